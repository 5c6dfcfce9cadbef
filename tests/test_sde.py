import itertools
import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import (
    SDES,
    Transition,
    cps,
    diffuse,
    flow_sde,
    kl,
    log_prob,
    ode,
    sample,
    velocity_slope,
)

# Gaussian data N(M, S0^2): x = (1 - sigma) x_0 + sigma noise is Gaussian at every sigma, so
# the exact velocity E[noise - x_0 | x] is the regression line.
M, S0 = 1.5, 0.5


def exact_velocity(x, sigma):
    mean, variance = (1 - sigma) * M, ((1 - sigma) * S0) ** 2 + sigma**2
    covariance = sigma - (1 - sigma) * S0**2
    return -M + covariance / variance * (x - mean)


def shifted_sigmas(num_steps, shift=3.0):
    sigmas = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * sigmas / (1 + (shift - 1) * sigmas)).float()


def final_moments(name, num_steps, noise_level):
    """Propagate mean and std without sampling error: with this velocity each step is affine."""
    sigmas, mean, variance = shifted_sigmas(num_steps), 0.0, 1.0
    x = torch.tensor([[0.0], [1.0]])
    for i in range(num_steps):
        sigma, sigma_next = sigmas[i].expand(2), sigmas[i + 1].expand(2)
        v = exact_velocity(x, sigma[:, None])
        step = SDES[name].step(
            x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=sigmas[1]
        )
        offset = step.mean[0].item()
        slope = step.mean[1].item() - offset
        mean, variance = slope * mean + offset, slope**2 * variance + step.std[0].item() ** 2
    return mean, variance**0.5


@pytest.mark.parametrize("noise_level", [0.3, 0.7])
@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_flow_and_dance_sde_keep_the_data_marginal(name, noise_level):
    errors = []
    for num_steps in (50, 100, 200, 400):
        mean, std = final_moments(name, num_steps, noise_level)
        errors.append(abs(std / S0 - 1))
        assert abs(mean / M - 1) < 1e-3
    # First order in the step size: twice the steps, about half the error.
    assert all(fine < 0.6 * coarse for coarse, fine in itertools.pairwise(errors))
    assert errors[2] < 0.02
    assert errors[3] < 0.02


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
def test_sampled_trajectories_keep_the_data_marginal(name):
    num_samples, num_steps = 20_000, 200
    source = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 1, generator=source)
    noises = torch.randn(num_samples, num_steps, 1, generator=source)
    final = sample_trajectory(
        lambda x, sigma, *, replay: exact_velocity(x, sigma[:, None]),
        x,
        shifted_sigmas(num_steps),
        sde=SDES[name],
        noise_level=0.7,
        stochastic=range(num_steps),
        noises=noises,
    ).final
    assert abs(final.mean() / M - 1) < 0.02
    assert abs(final.std() / S0 - 1) < 0.02


def test_cps_does_not_keep_the_data_marginal_however_many_steps():
    errors = [abs(final_moments("cps", n, 0.7)[1] / S0 - 1) for n in (200, 400, 800)]
    assert min(errors) > 0.1
    assert errors[1] - errors[2] < 0.1 * errors[2]  # it has converged, to something else


@pytest.mark.parametrize("noise_level", [0.2, 0.8, 1.0, 1.3])
def test_cps_keeps_the_coefficients(noise_level):
    sigma = torch.linspace(1, 0.1, 10, dtype=torch.float64).float()
    sigma_next = torch.linspace(0.9, 0, 10, dtype=torch.float64).float()
    # x_0 = 0 and noise = 1 (x = sigma, velocity = 1): the mean is the predicted noise's
    # coefficient. x_0 = 1 and noise = 0: the mean is the predicted image's.
    noise_part = cps(sigma[:, None], torch.ones(10, 1), sigma, sigma_next, noise_level=noise_level)
    image_part = cps(
        1 - sigma[:, None], -torch.ones(10, 1), sigma, sigma_next, noise_level=noise_level
    )
    assert (noise_part.mean >= 0).all()  # above noise_level 1 too: the positive root
    total = noise_part.std.double().square() + noise_part.mean.double().square()
    torch.testing.assert_close(total[:, 0], sigma_next.double().square(), rtol=1e-6, atol=2e-7)
    torch.testing.assert_close(image_part.mean[:, 0], 1 - sigma_next, rtol=1e-6, atol=2e-7)
    expected = sigma_next * math.sin(noise_level * math.pi / 2)
    torch.testing.assert_close(noise_part.std[:, 0], expected)


def random_state(seed=0, dtype=torch.float32, batch=4):
    source = torch.Generator().manual_seed(seed)
    x, v, noise = torch.randn(3, batch, 3, 4, 4, generator=source).to(dtype)
    sigma = torch.tensor([1.0, 0.9601, 0.5, 0.0089])[:batch]
    sigma_next = torch.tensor([0.9601, 0.9, 0.3, 0.0])[:batch]
    return x, v, noise, sigma, sigma_next


def test_ode_moves_along_the_velocity():
    x, v, _, sigma, sigma_next = random_state()
    expected = torch.stack([x[i] + v[i] * (sigma_next[i] - sigma[i]) for i in range(len(x))])
    torch.testing.assert_close(ode(x, v, sigma, sigma_next), expected)
    # The exact velocity of one image, noise - x_0, leads to it in a single step.
    x_0, noise = torch.randn(2, 1, 5)
    ones = torch.ones(1)
    torch.testing.assert_close(ode(noise, noise - x_0, ones, 0 * ones), x_0)


@pytest.mark.parametrize("name", SDES)
def test_noise_level_0_is_the_ode_exactly(name):
    x, v, noise, sigma, sigma_next = random_state()
    step = SDES[name].step(x, v, sigma, sigma_next, noise_level=0.0, sigma_max=0.9601)
    assert torch.equal(step.mean, ode(x, v, sigma, sigma_next))
    assert torch.equal(sample(step, noise), ode(x, v, sigma, sigma_next))
    assert not step.std.any()


def test_flow_sde_at_sigma_1_uses_the_schedules_second_sigma():
    # s = a / sqrt(1 - sigma_1), dt = 1 - sigma_1: std = a, x keeps 1 - a^2 / 2, v keeps dt.
    x, v, _, _, _ = random_state()
    ones = torch.ones(len(x))
    step = flow_sde(x, v, ones, 0.96 * ones, noise_level=0.7, sigma_max=0.96)
    torch.testing.assert_close(step.std.flatten(), 0.7 * ones, rtol=1e-5, atol=0)
    torch.testing.assert_close(step.mean, 0.755 * x - 0.04 * v, rtol=1e-5, atol=1e-6)


def test_sigma_max_may_be_a_float_a_scalar_tensor_or_one_per_sample():
    x, v, _, sigma, sigma_next = random_state()
    scalar = torch.tensor(0.9601)
    steps = [
        flow_sde(x, v, sigma, sigma_next, noise_level=0.7, sigma_max=sigma_max)
        for sigma_max in (0.9601, scalar, scalar.expand(len(x)))
    ]
    assert all(torch.equal(step.mean, steps[0].mean) for step in steps)
    assert all(torch.equal(step.std, steps[0].std) for step in steps)


@pytest.mark.parametrize("name", SDES)
def test_a_sample_does_not_depend_on_its_batch_and_std_broadcasts(name):
    x, v, _, sigma, sigma_next = random_state()
    whole = SDES[name].step(x, v, sigma, sigma_next, noise_level=0.7, sigma_max=0.9601)
    assert whole.std.shape == (4, 1, 1, 1)
    for i in range(len(x)):
        row = slice(i, i + 1)
        one = SDES[name].step(
            x[row], v[row], sigma[row], sigma_next[row], noise_level=0.7, sigma_max=0.9601
        )
        assert torch.equal(one.mean, whole.mean[row])
        assert torch.equal(one.std, whole.std[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", SDES)
def test_everything_is_computed_in_float32(name, dtype):
    x, v, noise, sigma, sigma_next = random_state(dtype=dtype)
    sigma, sigma_next = sigma.double(), sigma_next.double()
    assert ode(x, v, sigma, sigma_next).dtype == torch.float32
    settings = {"noise_level": 0.7, "sigma_max": 0.9601}
    low = SDES[name].step(x, v, sigma, sigma_next, **settings)
    full = SDES[name].step(x.float(), v.float(), sigma.float(), sigma_next.float(), **settings)
    assert low.mean.dtype == low.std.dtype == sample(low, noise).dtype == torch.float32
    assert torch.equal(low.mean, full.mean)
    assert torch.equal(low.std, full.std)
    assert log_prob(low, x).dtype == kl(low, x).dtype == torch.float32


def test_diffuse_is_the_state_whose_exact_velocity_leads_back_to_the_image():
    x_0, noise, _, sigma, _ = random_state()
    x = diffuse(x_0, noise, sigma)
    assert torch.equal(x[0], noise[0])  # sigma 1
    torch.testing.assert_close(x[2], (x_0[2] + noise[2]) / 2)  # sigma 0.5
    torch.testing.assert_close(ode(x, noise - x_0, sigma, 0 * sigma), x_0)
    assert torch.equal(diffuse(x_0, noise, 0 * sigma), x_0)
    assert diffuse(x_0.double(), noise.double(), sigma).dtype == torch.float32
    low = diffuse(x_0.bfloat16(), noise.bfloat16(), sigma.double())
    assert low.dtype == torch.float32
    assert torch.equal(low, diffuse(x_0.bfloat16().float(), noise.bfloat16().float(), sigma))


@pytest.mark.parametrize("noise_level", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("name", SDES)
def test_velocity_slope_is_the_gradient_of_the_mean(name, noise_level):
    # Row 0 begins at sigma 1, row 3 ends at sigma 0.
    x, v, _, sigma, sigma_next = random_state()
    v.requires_grad_()
    step = SDES[name].step(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=0.9601)
    (gradient,) = torch.autograd.grad(step.mean.sum(), v)
    slope = velocity_slope(name, sigma, sigma_next, noise_level=noise_level)
    assert slope.shape == (4,)
    assert slope.dtype == torch.float32
    expected = gradient.abs().flatten(1)
    torch.testing.assert_close(slope[:, None].expand_as(expected), expected, rtol=1e-6, atol=0)


def test_velocity_slope_counted_by_hand():
    # sigma 0.5 to 0.3, noise level 1, dt 0.2. Flow-SDE: dt (1 + 1/2). Dance-SDE:
    # dt + dt (1 - 0.5) / (2 * 0.5). CPS: cos is 0, so only x_0 = x - 0.5 v is kept, 0.7 of it.
    state = torch.tensor([0.5]), torch.tensor([0.3])
    slopes = {name: velocity_slope(name, *state, noise_level=1.0).item() for name in SDES}
    assert slopes == pytest.approx({"flow_sde": 0.3, "cps": 0.35, "dance_sde": 0.3}, rel=1e-5)
    first = torch.ones(1), torch.tensor([0.96])
    assert velocity_slope("flow_sde", *first, noise_level=0.7).item() == pytest.approx(0.04)


def random_transition():
    source = torch.Generator().manual_seed(1)
    mean, x_next, reference = torch.randn(3, 4, 3, 4, 4, generator=source)
    std = torch.tensor([0.006, 0.2, 0.9, 3.0]).view(4, 1, 1, 1)
    return Transition(mean, std), mean + std * x_next, mean + std * reference


def test_log_prob_is_the_mean_log_density_of_torch_distributions():
    step, x_next, _ = random_transition()
    expected = Normal(step.mean.double(), step.std.double()).log_prob(x_next.double())
    actual = log_prob(step, x_next)
    assert actual.shape == (4,)
    torch.testing.assert_close(actual.double(), expected.mean((1, 2, 3)), rtol=1e-4, atol=1e-5)


def test_log_prob_without_constants_is_the_negative_mean_square():
    step, x_next, _ = random_transition()
    expected = -(x_next - step.mean).square().mean((1, 2, 3))
    torch.testing.assert_close(log_prob(step, x_next, normalised=False), expected)


def test_kl_is_the_mean_kl_of_torch_distributions():
    step, _, reference = random_transition()
    std = step.std.double()
    expected = kl_divergence(Normal(step.mean.double(), std), Normal(reference.double(), std))
    actual = kl(step, reference)
    torch.testing.assert_close(actual.double(), expected.mean((1, 2, 3)), rtol=1e-4, atol=1e-7)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(kl(step, reference, scale=scale), scale * actual)
    torch.testing.assert_close(kl(step, reference, scale=0.5), 0.5 * actual)


def test_the_gradient_of_log_prob_flows_through_the_mean_only():
    step, x_next, _ = random_transition()
    mean, x_next = step.mean.requires_grad_(), x_next.requires_grad_()
    log_prob(Transition(mean, step.std), x_next).sum().backward()
    assert mean.grad.abs().sum() > 0
    assert x_next.grad is None


def test_each_sde_uses_its_own_form_of_log_prob():
    assert {name: sde.normalised for name, sde in SDES.items()} == {
        "flow_sde": True,
        "cps": False,
        "dance_sde": True,
    }


def guard_states(name, num_draws):
    """Draw x_next of an old policy; a new one's mean differs. All float64 but the steps."""
    x, v, _, sigma, sigma_next = random_state()
    sigma_next[3] = 0.004  # CPS has no noise on its way to sigma 0
    settings = {"noise_level": 0.7, "sigma_max": 0.9601}
    old = SDES[name].step(x, v, sigma, sigma_next, **settings)
    drift = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    new = SDES[name].step(x, v + 0.5 * drift, sigma, sigma_next, **settings)
    old, new = (Transition(step.mean.double(), step.std.double()) for step in (old, new))
    noise = torch.randn(
        num_draws, *x.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    return old, new, noise


def log_ratios(name, old, new, noise):
    """Return the ratio of flow_grpo's log-probs and that of torch's: (draws, 4)."""
    x_next = (old.mean + old.std * noise).float()
    mine = torch.stack(
        [
            log_prob(new, each, normalised=SDES[name].normalised)
            - log_prob(old, each, normalised=SDES[name].normalised)
            for each in x_next
        ]
    )
    theirs = [Normal(step.mean, step.std).log_prob(x_next.double()) for step in (new, old)]
    return mine, (theirs[0] - theirs[1]).mean((2, 3, 4))


@pytest.mark.parametrize("name", SDES)
def test_a_log_ratio_freed_of_its_bias_is_the_noise_times_the_change_of_the_mean(name):
    old, new, noise = guard_states(name, num_draws=50)
    change = new.mean - old.mean
    std = old.std.flatten()
    expected = (noise * change).mean((2, 3, 4))
    mine, theirs = log_ratios(name, old, new, noise)
    bias = change.square().mean((1, 2, 3)) / (2 * std**2)
    # x_next is rounded to float32 (6e-8): an error of that over std in the noise.
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close((theirs + bias) * std, expected, **tolerance)
    if not SDES[name].normalised:
        mine = mine / (2 * std**2)  # the form without std: minus the squared distance
    torch.testing.assert_close((mine.double() + bias) * std, expected, **tolerance)


@pytest.mark.parametrize("name", SDES)
def test_a_log_ratio_is_biased_by_the_kl_and_freed_of_it_is_not(name):
    num_draws = 20_000
    old, new, noise = guard_states(name, num_draws)
    change, std = new.mean - old.mean, old.std.flatten()
    plain = (noise * change / old.std - change.square() / (2 * old.std**2)).mean((2, 3, 4))
    freed = (noise * change).mean((2, 3, 4))
    # A mean over 48 elements has the std |change| / 48, in units of std for the plain one.
    deviation = change.flatten(1).norm(dim=1) / 48 / num_draws**0.5
    assert (freed.mean(0).abs() < 4 * deviation).all()
    bias = kl(old, new.mean).double()
    assert ((plain.mean(0) + bias).abs() < 4 * deviation / std).all()
    # At each of these steps the bias itself is far beyond that.
    assert (bias > 8 * deviation / std).all()
