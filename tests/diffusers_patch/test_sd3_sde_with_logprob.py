"""The step that people import equals the formulas of its documentation and the core."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flow_grpo import sde, seeds
from flow_grpo.diffusers_patch.sd3_sde_with_logprob import sde_step_with_logprob


@pytest.fixture
def scheduler():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    return scheduler


def _tensors(num: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    sample = seeds.normal((num, 4, 6, 6), 0, seeds.INITIAL_NOISE)
    return sample, seeds.normal((num, 4, 6, 6), 0, seeds.STEP_NOISE)


def _four_d(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, 1, 1, 1)


def test_the_sde_step_is_the_published_formula(scheduler):
    x, v = (t.double() for t in _tensors())
    place = torch.tensor([1, 4, 8])
    x_next, log_prob, mean, std, sqrt_dt = sde_step_with_logprob(
        scheduler, v, scheduler.timesteps[place], x, 0.7, return_sqrt_dt=True
    )
    sigmas = scheduler.sigmas.double()
    sigma, dt = _four_d(sigmas[place]), _four_d(sigmas[place + 1] - sigmas[place])
    s = 0.7 * (sigma / (1 - sigma)).sqrt()
    wanted = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    torch.testing.assert_close(mean.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(std.double(), s, rtol=1e-5, atol=0)  # without sqrt(dt)
    torch.testing.assert_close(sqrt_dt.double(), (-dt).sqrt(), rtol=1e-5, atol=0)
    density = torch.distributions.Normal(wanted, s * (-dt).sqrt()).log_prob(x_next.double())
    torch.testing.assert_close(log_prob.double(), density.mean((1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert {t.dtype for t in (x_next, log_prob, mean, std)} == {torch.float32}


def test_the_cps_step_is_the_published_formula(scheduler):
    x, v = (t.double() for t in _tensors())
    place = torch.tensor([0, 4, 8])
    x_next, log_prob, mean, std = sde_step_with_logprob(
        scheduler, v, scheduler.timesteps[place], x, 0.8, sde_type="cps"
    )
    sigmas = scheduler.sigmas.double()
    sigma, sigma_next = _four_d(sigmas[place]), _four_d(sigmas[place + 1])
    s = sigma_next * math.sin(0.4 * math.pi)
    kept = (sigma_next**2 - s**2).sqrt()
    wanted = (1 - sigma_next) * (x - sigma * v) + kept * (x + (1 - sigma) * v)
    torch.testing.assert_close(mean.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(std.double(), s, rtol=1e-5, atol=0)  # of the whole step
    distance = -((x_next.double() - wanted) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(log_prob.double(), distance, rtol=1e-4, atol=1e-6)


def test_the_first_steps_std_is_the_noise_level(scheduler):
    # sigma = 1: s = a / sqrt(1 - sigma_1) and dt = 1 - sigma_1
    x, v = _tensors(1)
    *_, std, sqrt_dt = sde_step_with_logprob(
        scheduler, v, scheduler.timesteps[0], x, 0.7, return_sqrt_dt=True
    )
    assert (std * sqrt_dt).item() == pytest.approx(0.7, rel=1e-5)


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_scoring_a_drawn_step_gives_its_log_prob_to_the_bit(scheduler, sde_type):
    x, v = _tensors()
    t = scheduler.timesteps[3]
    drawn = sde_step_with_logprob(scheduler, v, t, x, sde_type=sde_type)
    scored = sde_step_with_logprob(scheduler, v, t, x, prev_sample=drawn[0], sde_type=sde_type)
    assert all(torch.equal(a, b) for a, b in zip(drawn, scored))


def test_log_probs_are_the_cores(scheduler):
    x, v = _tensors()
    sigma, sigma_next = (scheduler.sigmas[i].expand(3) for i in (5, 6))
    for sde_type, name in (("sde", "flow_sde"), ("cps", "cps")):
        x_next, log_prob, *_ = sde_step_with_logprob(
            scheduler, v, scheduler.timesteps[5], x, 0.6, sde_type=sde_type
        )
        kind = sde.SDES[name]
        transition = kind.step(
            x, v, sigma, sigma_next, noise_level=0.6, sigma_max=scheduler.sigmas[1]
        )
        core = sde.log_prob(transition, x_next, normalised=kind.normalised)
        assert torch.equal(log_prob, core)


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_noise_level_0_is_the_schedulers_own_step(scheduler, sde_type):
    x, v = _tensors()
    for place in (0, 4, 9):
        own = FlowMatchEulerDiscreteScheduler(shift=3.0)
        own.set_timesteps(10)
        wanted = own.step(v, own.timesteps[place], x).prev_sample
        x_next, *_ = sde_step_with_logprob(
            scheduler, v, scheduler.timesteps[place], x, 0.0, sde_type=sde_type
        )
        torch.testing.assert_close(x_next, wanted, rtol=0, atol=1e-6)


def test_the_gradient_flows_through_the_mean_only(scheduler):
    x, v = _tensors()
    v.requires_grad_(True)
    x_next, log_prob, mean, _ = sde_step_with_logprob(scheduler, v, scheduler.timesteps[4], x)
    assert mean.requires_grad
    given = x_next.detach().requires_grad_(True)
    _, log_prob, *_ = sde_step_with_logprob(
        scheduler, v, scheduler.timesteps[4], x, prev_sample=given
    )
    log_prob.sum().backward()
    assert v.grad.abs().sum() > 0
    assert given.grad is None


def test_the_generator_decides_the_noise(scheduler):
    x, v = _tensors()
    t = scheduler.timesteps[2]
    first, again, other = (
        sde_step_with_logprob(scheduler, v, t, x, generator=torch.Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1


def test_half_precision_timesteps_find_their_place(scheduler):
    x, v = _tensors(10)
    exact = sde_step_with_logprob(scheduler, v, scheduler.timesteps, x, 0.0)[0]
    rounded = sde_step_with_logprob(scheduler, v, scheduler.timesteps.bfloat16(), x, 0.0)[0]
    assert torch.equal(exact, rounded)


def test_bad_arguments_are_one_clear_error(scheduler):
    x, v = _tensors()
    with pytest.raises(ValueError, match="'ode'; there are: sde, cps"):
        sde_step_with_logprob(scheduler, v, scheduler.timesteps[0], x, sde_type="ode")
    with pytest.raises(ValueError, match="give no generator"):
        sde_step_with_logprob(
            scheduler, v, scheduler.timesteps[0], x, prev_sample=x, generator=torch.Generator()
        )
