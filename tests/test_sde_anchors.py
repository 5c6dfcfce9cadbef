"""Published schedules and the step sizes, gradients and KLs they imply, to the digits printed."""

import pytest
import torch

from flow_grpo.sde import cps, dance_sde, flow_sde, kl, log_prob

# SD3, shift 3, 10 steps. Per step: sigma, dt, Flow-SDE (0.7) std / sqrt(dt), std, |d log_prob/dv|,
# CPS (0.8) std and |d log_prob/dv|, KL of a velocity difference of 1, that KL times dt.
SD3 = """
1      .0399 3.506 .700 .057  .913  .073 .0016 6.5e-5
.9601  .0468 3.435 .743 .078  .869  .125 .0031 1.4e-4
.9133  .0556 2.273 .536 .129  .816  .175 .0084 4.6e-4
.8577  .0673 1.719 .446 .188  .752  .218 .0177 1.2e-3
.7904  .0831 1.359 .392 .264  .673  .250 .0349 2.9e-3
.7073  .1051 1.088 .353 .371  .573  .260 .0688 7.2e-3
.6022  .1373 .861  .319 .536  .442  .234 .143  .0197
.4649  .1869 .652  .282 .825  .264  .153 .340  .0636
.2780  .2691 .434  .225 1.487 .0085 .005 1.105 .297
.0089  .0089 .066  .006 1.771 0     0    1.568 .0140
"""
# Flux, 512 px, 6 steps, mu 0.63. Flow-SDE (0.9) std / sqrt(dt), std, gradient; CPS (0.8) std.
FLUX_SIGMAS = "1 .9037 .7897 .6525 .4842 .2730"
FLUX = """
2.90 .900 .107 .860
2.76 .931 .172 .751
1.74 .646 .298 .621
1.23 .506 .467 .461
.872 .401 .741 .260
.552 .288 1.331 0
"""


def rows(table):
    return [line.split() for line in table.strip().splitlines()]


def assert_printed(actual, printed):
    """Hold a number to the digits that its anchor prints; some were cut off, not rounded."""
    digits, _, exponent = printed.partition("e")
    decimals = len(digits.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - decimals)
    # A printed 0 or 1 without decimals is exact.
    tolerance = 1.01 * unit if decimals else 1e-6
    assert abs(float(actual) - float(printed)) <= tolerance, (float(actual), printed)


def sd3_sigmas():
    """Follow diffusers: sigma_min is shifted once with the training table and once more here."""

    def shift(sigma):
        return 3 * sigma / (1 + 2 * sigma)

    spaced = torch.linspace(1, shift(0.001), 10, dtype=torch.float64)
    return torch.cat([shift(spaced), torch.zeros(1, dtype=torch.float64)]).float()


def flux_sigmas():
    spaced = torch.linspace(1, 1 / 6, 6, dtype=torch.float64)
    shifted = torch.e**0.63 / (torch.e**0.63 + (1 / spaced - 1))
    return torch.cat([shifted, torch.zeros(1, dtype=torch.float64)]).float()


def measure(step, sigmas, *, normalised, **settings):
    """Return std, |d log_prob / dv| at noise 1 and KL at a velocity difference of 1, per step."""
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    x, v = torch.full((len(sigma), 1), 0.3), torch.zeros(len(sigma), 1, requires_grad=True)
    transition = step(x, v, sigma, sigma_next, **settings)
    x_next = transition.mean + transition.std  # one element a sample: D = 1
    log_prob(transition, x_next, normalised=normalised).sum().backward()
    other = step(x, v.detach() + 1, sigma, sigma_next, **settings)
    return transition.std[:, 0], v.grad[:, 0].abs(), kl(transition, other.mean).detach()


def test_the_schedules_are_the_published_ones():
    for sigma, row in zip(sd3_sigmas(), rows(SD3), strict=False):
        assert_printed(sigma, row[0])
    for sigma, printed in zip(flux_sigmas(), FLUX_SIGMAS.split(), strict=False):
        assert_printed(sigma, printed)


@pytest.mark.parametrize("i", range(10))
def test_sd3_steps_have_the_published_numbers(i):
    sigmas = sd3_sigmas()
    dt = sigmas[:-1] - sigmas[1:]
    std, gradient, divergence = measure(
        flow_sde, sigmas, normalised=True, noise_level=0.7, sigma_max=sigmas[1]
    )
    cps_std, cps_gradient, _ = measure(cps, sigmas, normalised=False, noise_level=0.8)
    actual = (sigmas[:-1], dt, std / dt.sqrt(), std, gradient, cps_std, cps_gradient,
              divergence, divergence * dt)  # fmt: skip
    for column, printed in zip(actual, rows(SD3)[i], strict=True):
        assert_printed(column[i], printed)


@pytest.mark.parametrize("i", range(6))
def test_flux_steps_have_the_published_numbers(i):
    sigmas = flux_sigmas()
    dt = sigmas[:-1] - sigmas[1:]
    std, gradient, _ = measure(
        flow_sde, sigmas, normalised=True, noise_level=0.9, sigma_max=sigmas[1]
    )
    cps_std, _, _ = measure(cps, sigmas, normalised=False, noise_level=0.8)
    for column, printed in zip((std / dt.sqrt(), std, gradient, cps_std), rows(FLUX)[i],
                               strict=True):  # fmt: skip
        assert_printed(column[i], printed)


def test_one_step_of_each_sde_equals_the_papers_own_form_by_hand():
    # x = 1, v = 2, sigma = 0.5, sigma_next = 0.3, a = 0.7; x_0 = 0, noise = 2.
    x, v = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    state = x, v, torch.tensor([0.5]), torch.tensor([0.3])
    # s^2 = 0.49 * 0.5 / 0.5 = 0.49. mean = 1 - 0.2 * (2 + 0.49 / (2 * 0.5) * (1 + 0.5 * 2))
    #      = 1 - 0.2 * 2.98 = 0.404. std = 0.7 * sqrt(0.2) = 0.313050.
    step = flow_sde(*state, noise_level=0.7, sigma_max=0.9)
    assert step.mean.item() == pytest.approx(0.404, abs=1e-6)
    assert step.std.item() == pytest.approx(0.313050, abs=1e-6)
    # score = -(1 - 0.5 * x_0) / 0.25 = -4. mean = 1 - 0.2 * 2 + 0.5 * 0.49 * 0.2 * (-4) = 0.404.
    step = dance_sde(*state, noise_level=0.7)
    assert step.mean.item() == pytest.approx(0.404, abs=1e-6)
    assert step.std.item() == pytest.approx(0.313050, abs=1e-6)
    # mean = 0.7 * 0 + 0.3 * cos(63 deg) * 2 = 0.272394. std = 0.3 * sin(63 deg) = 0.267302.
    step = cps(*state, noise_level=0.7)
    assert step.mean.item() == pytest.approx(0.272394, abs=1e-6)
    assert step.std.item() == pytest.approx(0.267302, abs=1e-6)
