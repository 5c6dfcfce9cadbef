import math

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDES, dpm2m, ode, predicted_x_0

# Gaussian data N(M, S0^2): x at sigma is Gaussian, the velocity is the regression of noise - x_0
# on x.
M, S0 = 1.5, 0.5
X_1 = torch.linspace(-2, 2, 9).view(-1, 1)


def gaussian_velocity(x, sigma):
    variance = ((1 - sigma) * S0) ** 2 + sigma**2
    slope = (sigma - (1 - sigma) * S0**2) / variance
    return -M + slope * (x - (1 - sigma) * M)


def shifted_sigmas(num_steps, shift=3.0):
    sigmas = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * sigmas / (1 + (shift - 1) * sigmas)).float()


def solve(solver, sigmas, x=X_1, velocity=gaussian_velocity, **settings):
    return sample_trajectory(
        lambda x, sigma, *, replay: velocity(x, sigma.view(-1, *[1] * (x.ndim - 1))),
        x,
        sigmas,
        solver=solver,
        **settings,
    ).final


def exact_state(x, sigma, sigma_next):
    """Follow the exact ODE: every x keeps its number of standard deviations from the mean."""
    std, std_next = (math.hypot((1 - s) * S0, s) for s in (sigma, sigma_next))
    return (1 - sigma_next) * M + std_next / std * (x - (1 - sigma) * M)


def error(solver, sigmas):
    exact = exact_state(X_1, sigmas[0].item(), sigmas[-1].item())
    return (solve(solver, sigmas) - exact).abs().max().item()


def measured_order(solver, start, end, counts=(32, 48, 64, 96, 128)):
    """Fit log error against log steps."""
    errors = [error(solver, torch.linspace(start, end, n + 1)) for n in counts]
    assert errors[-1] > 1e-4  # above float32's rounding: it is the order that is measured
    return -np.polyfit(np.log(counts), np.log(errors), 1)[0]


@pytest.mark.parametrize("start", [1.0, 0.9])
def test_dpm2m_converges_with_order_2_and_euler_with_order_1(start):
    # At sigma 0 lambda is infinite and the last steps are never small in it: hence the end 0.1.
    assert measured_order("euler", start, 0.1) == pytest.approx(1, abs=0.05)
    assert measured_order("dpm2m", start, 0.1) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("num_steps", [20, 40, 80])
def test_dpm2m_ends_closer_to_the_data_than_euler(num_steps):
    sigmas = shifted_sigmas(num_steps)
    assert error("dpm2m", sigmas) < 0.5 * error("euler", sigmas)


def diffusers_solver(sigmas, x, velocity):
    """Run diffusers' multistep solver on these sigmas; its lambda is of them, not of timesteps."""
    num_steps = len(sigmas) - 1
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        solver_order=2,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        lower_order_final=True,
    )
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas = sigmas
    scheduler.timesteps = torch.arange(num_steps, 0, -1)
    states = []
    for i, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, sigmas[i]), timestep, x, return_dict=False)[0]
        states.append(x)
    return states


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # diffusers' own
@pytest.mark.parametrize("first_sigma", [1.0, 0.999])
@pytest.mark.parametrize("num_steps", [2, 3, 10, 40])
def test_dpm2m_equals_diffusers_multistep_solver(num_steps, first_sigma):
    sigmas = shifted_sigmas(num_steps)
    sigmas[0] = first_sigma
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    expected = diffusers_solver(sigmas, x, gaussian_velocity)
    for last in range(1, num_steps + 1):
        actual = solve("dpm2m", sigmas, x, last=last)
        torch.testing.assert_close(actual, expected[last - 1], rtol=1e-5, atol=1e-5)
    # Euler's end is far away, so the comparison can tell. (2 steps are Euler's, and so are 3 from
    # sigma 1: the first has no past, the second an infinite one, the last an infinite future.)
    if num_steps > 3:
        assert (solve("euler", sigmas, x) - expected[-1]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")
def test_dpm2m_equals_diffusers_with_a_nonlinear_velocity():
    sigmas = shifted_sigmas(12)
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))

    def velocity(x, sigma):
        return torch.sin(3 * x) * (1 + sigma) - x

    expected = diffusers_solver(sigmas, x, velocity)[-1]
    # The velocity's slope of up to 5 lets a rounding error grow over the run.
    torch.testing.assert_close(
        solve("dpm2m", sigmas, x, velocity=velocity), expected, rtol=0, atol=3e-5
    )


def random_state(batch=4):
    source = torch.Generator().manual_seed(0)
    x, v, previous = torch.randn(3, batch, 3, 4, generator=source)
    return x, v, previous, torch.tensor([0.9, 0.7, 0.5, 0.2]), torch.tensor([0.7, 0.5, 0.4, 0.1])


def test_a_step_counted_by_hand():
    # sigma 2/3 -> 1/2 -> 1/3: lambda = -log 2, 0, log 2, two equal steps, so the weight of the
    # change of x_0 is (1 - sigma_next / sigma) / 2 = 1/6. x_0 = 3 - 2/2 = 2, before it 5.
    x, v, previous = torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([[5.0]])
    sigmas = torch.tensor([[2 / 3], [1 / 2], [1 / 3]])
    actual = dpm2m(x, v, sigmas[1], sigmas[2], previous=previous, sigma_previous=sigmas[0])
    # Euler arrives at 3 - 2/6, and the correction is (2 - 5) / 6.
    torch.testing.assert_close(actual, torch.tensor([[8 / 3 - 1 / 2]]))
    torch.testing.assert_close(predicted_x_0(x, v, sigmas[1]), torch.tensor([[2.0]]))


def test_without_a_finite_past_and_future_a_step_is_eulers_exactly():
    x, v, previous, sigma, sigma_next = random_state()
    euler = ode(x, v, sigma, sigma_next)
    assert torch.equal(dpm2m(x, v, sigma, sigma_next, previous=None, sigma_previous=None), euler)
    # A batch may mix them: sigma_previous 1 in row 0, sigma_next 0 in row 3.
    sigma_previous, sigma_next[3] = torch.tensor([1.0, 0.9, 0.7, 0.4]), 0
    mixed = dpm2m(x, v, sigma, sigma_next, previous=previous, sigma_previous=sigma_previous)
    euler = ode(x, v, sigma, sigma_next)
    assert [torch.equal(mixed[i], euler[i]) for i in range(4)] == [True, False, False, True]
    assert mixed.isfinite().all()


def test_a_velocity_of_one_image_is_integrated_exactly():
    # On the straight path from noise to one image x_0 never changes: no correction.
    x_0, noise = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    final = solve("dpm2m", shifted_sigmas(8), noise, velocity=lambda x, sigma: noise - x_0)
    torch.testing.assert_close(final, x_0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dpm2m_is_computed_in_float32(dtype):
    x, v, previous, sigma, sigma_next = (each.to(dtype) for each in random_state())
    settings = {"previous": previous, "sigma_previous": (sigma + 1) / 2}
    low = dpm2m(x, v, sigma, sigma_next, **settings)
    full = dpm2m(
        x.float(),
        v.float(),
        sigma.float(),
        sigma_next.float(),
        previous=previous.float(),
        sigma_previous=settings["sigma_previous"].float(),
    )
    assert low.dtype == torch.float32
    assert torch.equal(low, full)


def window_run(stochastic, **settings):
    sigmas = shifted_sigmas(8)
    noises = torch.randn(9, len(stochastic), 1, generator=torch.Generator().manual_seed(2))
    return solve(
        "dpm2m",
        sigmas,
        sde=SDES["flow_sde"],
        noise_level=0.7,
        stochastic=stochastic,
        noises=noises,
        **settings,
    )


def test_the_history_begins_anew_after_a_stochastic_step():
    sigmas = shifted_sigmas(8)
    x = window_run((3,), last=4)
    expected, past = x, (None, None)
    for i in range(4, 8):
        sigma, sigma_next = sigmas[i].expand(9), sigmas[i + 1].expand(9)
        v = gaussian_velocity(expected, sigma[:, None])
        x_0 = predicted_x_0(expected, v, sigma)
        expected = dpm2m(expected, v, sigma, sigma_next, previous=past[0], sigma_previous=past[1])
        past = x_0, sigma
    assert torch.equal(window_run((3,)), expected)
    # Step 4 is Euler's, step 5 is not.
    v = gaussian_velocity(x, sigmas[4])
    euler = ode(x, v, sigmas[4].expand(9), sigmas[5].expand(9))
    assert torch.equal(window_run((3,), last=5), euler)
    v = gaussian_velocity(euler, sigmas[5])
    second = ode(euler, v, sigmas[5].expand(9), sigmas[6].expand(9))
    assert (window_run((3,), last=6) - second).abs().max() > 1e-3
