"""Stochastic and deterministic steps along sigma, their log-probabilities and their KL.

x = (1 - sigma) x_0 + sigma noise, velocity = noise - x_0, sigma falls from 1 to 0 and
dt = sigma - sigma_next > 0. All maths is float32 whatever comes in; nothing here waits for the
device. One function serves rollout and training, so the ratio of an unchanged policy is exactly 1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A step that starts within this distance of sigma 1 counts as the first one (see flow_sde).
PURE_NOISE_TOLERANCE = 1e-6
SOLVERS = ("euler", "dpm2m")


class Transition(NamedTuple):
    """p(x_next | x) = Normal(mean, std**2)."""

    mean: Tensor  # (b, *latent) float32
    std: Tensor  # (b, 1, ...) float32, of the whole step: sqrt(dt) included


def _per_sample(values: Tensor, x: Tensor) -> Tensor:
    """Shape (b,) values so that they broadcast over x (b, *latent)."""
    return values.float().reshape(-1, *[1] * (x.ndim - 1))


def ode(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Take one Euler step of dx = velocity dsigma: (b, *latent) float32."""
    dt = _per_sample(sigma, x) - _per_sample(sigma_next, x)
    return x.float() - velocity.float() * dt


def predicted_x_0(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """Follow the velocity to sigma 0: (b, *latent) float32."""
    return x.float() - _per_sample(sigma, x) * velocity.float()


def dpm2m(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    previous: Tensor | None,
    sigma_previous: Tensor | None,
) -> Tensor:
    """Take one DPM-Solver++(2M) step, second order in lambda = log((1 - sigma) / sigma).

    previous is the last step's predicted x_0 and sigma_previous where that step began. Exactly
    the ODE's step without them, and where a lambda is infinite: sigma_previous 1 or sigma_next 0.
    Source: Lu et al. 2022, arXiv 2211.01095, the midpoint form.
    """
    first_order = ode(x, velocity, sigma, sigma_next)
    if previous is None:
        return first_order
    change = predicted_x_0(x, velocity, sigma) - previous.float()
    sigma, sigma_next, sigma_previous = (
        _per_sample(values, x) for values in (sigma, sigma_next, sigma_previous)
    )
    before, now, after = (
        torch.log((1 - values) / values) for values in (sigma_previous, sigma, sigma_next)
    )
    # An infinite lambda before makes this 0, one after it infinite.
    weight = 0.5 * (1 - sigma_next / sigma) * (after - now) / (now - before)
    return torch.where(sigma_next > 0, first_order + weight * change, first_order)


def diffuse(x_0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Mix images and noise into the state at sigma (b,): (b, *latent) float32."""
    sigma = _per_sample(sigma, x_0)
    return (1 - sigma) * x_0.float() + sigma * noise.float()


def flow_sde(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    noise_level: float,
    sigma_max: float | Tensor,
) -> Transition:
    """Take one Euler-Maruyama step of Flow-GRPO's SDE, which keeps the marginals of the ODE.

    With s = noise_level * sqrt(sigma / (1 - sigma)) the drift is
    velocity + s^2 / (2 sigma) * (x + (1 - sigma) velocity) and the diffusion s. At sigma = 1 s has
    sigma_max, the schedule's second sigma, in place of sigma inside 1 - sigma. The coefficients
    below are the closed forms, exactly the ODE's at noise_level 0.
    Source: Liu et al. 2025, arXiv 2505.05470.
    """
    sigma, sigma_next = _per_sample(sigma, x), _per_sample(sigma_next, x)
    dt = sigma - sigma_next
    if isinstance(sigma_max, Tensor) and sigma_max.ndim:
        sigma_max = _per_sample(sigma_max, x)
    clear = 1 - torch.where(1 - sigma < PURE_NOISE_TOLERANCE, sigma_max, sigma)
    half_square = 0.5 * noise_level**2
    x_coefficient = 1 - half_square * dt / clear
    velocity_coefficient = dt + half_square * dt * ((1 - sigma) / clear)
    mean = x.float() * x_coefficient - velocity.float() * velocity_coefficient
    return Transition(mean, noise_level * torch.sqrt(sigma / clear * dt))


def cps(
    x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float
) -> Transition:
    """Take one coefficients-preserving step: renew a share of the predicted noise.

    std = sigma_next * sin(noise_level * pi / 2) and the predicted noise x + (1 - sigma) velocity
    keeps the coefficient sigma_next * |cos(noise_level * pi / 2)|, so std^2 + coefficient^2 =
    sigma_next^2 exactly. That is a property of the coefficients only: predicted noise has less
    variance than true noise, so over many steps the samples do NOT keep the data's marginal.
    Exactly the ODE at noise_level 0. Source: FlowCPS, arXiv 2509.05952.
    """
    angle = noise_level * math.pi / 2
    mean = ode(x, velocity, sigma, sigma_next)
    sigma, sigma_next = _per_sample(sigma, x), _per_sample(sigma_next, x)
    predicted_noise = x.float() + (1 - sigma) * velocity.float()
    mean = mean - sigma_next * (1 - abs(math.cos(angle))) * predicted_noise
    return Transition(mean, sigma_next * abs(math.sin(angle)))


def dance_sde(
    x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, *, noise_level: float
) -> Transition:
    """Take one Euler-Maruyama step with the constant diffusion noise_level.

    The score is minus the predicted noise over sigma; it keeps the marginals of the ODE.
    Exactly the ODE at noise_level 0. Source: DanceGRPO, arXiv 2505.07818.
    """
    mean = ode(x, velocity, sigma, sigma_next)
    sigma, sigma_next = _per_sample(sigma, x), _per_sample(sigma_next, x)
    dt = sigma - sigma_next
    predicted_noise = x.float() + (1 - sigma) * velocity.float()
    mean = mean - 0.5 * noise_level**2 * dt / sigma * predicted_noise
    return Transition(mean, noise_level * torch.sqrt(dt))


def sample(transition: Transition, noise: Tensor) -> Tensor:
    """Turn standard normal noise (b, *latent) into x_next: float32."""
    return transition.mean + transition.std * noise.float()


def log_prob(transition: Transition, x_next: Tensor, *, normalised: bool = True) -> Tensor:
    """Return the mean log-density per latent element of x_next (detached): (b,) float32.

    normalised=False is CPS's form: minus the squared distance, without std and constants.
    A normalised log-density needs std > 0.
    """
    distance = x_next.detach().float() - transition.mean
    if not normalised:
        return -distance.square().flatten(1).mean(1)
    density = -0.5 * (distance / transition.std).square()
    constant = transition.std.log().flatten(1).mean(1) + 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1) - constant


def kl(transition: Transition, reference_mean: Tensor, *, scale: float | Tensor = 1.0) -> Tensor:
    """Return KL(policy, reference) of equal std, mean per latent element: (b,) float32.

    scale is 1 for the true KL; the reference code's Flow-SDE coefficients need scale = dt, a float
    or (b,). Needs std > 0.
    """
    distance = (transition.mean - reference_mean.float()) / transition.std
    return 0.5 * distance.square().flatten(1).mean(1) * scale


class SDE(NamedTuple):
    """A named step: how it moves and which form of log-density belongs to it."""

    step: Callable[..., Transition]  # (x, velocity, sigma, sigma_next, *, noise_level, sigma_max)
    normalised: bool


SDES: dict[str, SDE] = {
    "flow_sde": SDE(flow_sde, True),
    "cps": SDE(lambda *state, noise_level, sigma_max: cps(*state, noise_level=noise_level), False),
    "dance_sde": SDE(
        lambda *state, noise_level, sigma_max: dance_sde(*state, noise_level=noise_level), True
    ),
}


def velocity_slope(
    sde_type: str, sigma: Tensor, sigma_next: Tensor, *, noise_level: float
) -> Tensor:
    """Return |d mean / d velocity| of a step, the same for every element: (b,) float32.

    Every mean is linear in (x, velocity) without a constant, so the slope is the mean at (0, 1).
    """
    velocity = torch.ones_like(sigma, dtype=torch.float32).unsqueeze(1)
    # At sigma 1 sigma_max moves x only: its share of the slope has the factor 1 - sigma.
    step = SDES[sde_type].step(
        0 * velocity, velocity, sigma, sigma_next, noise_level=noise_level, sigma_max=0.0
    )
    return step.mean.abs().squeeze(1)
