"""Offer `sde_step_with_logprob` with the signature and the return values that people know."""

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from flow_grpo import sde
from flow_grpo.registry import unknown

SDE_TYPES = {"sde": "flow_sde", "cps": "cps"}


def sde_step_with_logprob(
    scheduler,
    model_output: Tensor,
    timestep: float | Tensor,
    sample: Tensor,
    noise_level: float = 0.7,
    prev_sample: Tensor | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    sde_type: str = "sde",
    return_sqrt_dt: bool = False,
) -> tuple[Tensor, ...]:
    """Take one stochastic step, or score the step that led to `prev_sample`.

    Args:
        scheduler: a flow-matching Euler scheduler whose timesteps are set.
        model_output: velocity (b, *latent).
        timestep: of `sample`, a number, (1,) or (b,); the scheduler's nearest one is meant.
        sample: x (b, *latent).
        noise_level: a of Flow-SDE, eta of CPS; 0 is the ODE, and draws no noise.
        prev_sample: x_next to score; None draws it.
        generator: of the noise.
        sde_type: sde | cps.
        return_sqrt_dt: also return sqrt(sigma - sigma_next), (b, 1, ...).

    Returns:
        prev_sample, log_prob (b,), prev_sample_mean, std_dev_t (b, 1, ...), all float32.
        std_dev_t lacks the factor sqrt(dt) for sde and is the std of the step for cps. For sde at
        noise_level 0 there is no density, and log_prob is NaN.

    Raises:
        ValueError: another sde_type, or both `prev_sample` and `generator`.
    """
    if sde_type not in SDE_TYPES:
        raise ValueError(unknown("sde_type", sde_type, SDE_TYPES))
    if prev_sample is not None and generator is not None:
        raise ValueError("prev_sample is scored as it is: give no generator with it")
    place = _place(scheduler, timestep, sample)
    sigmas = scheduler.sigmas.to(sample.device, torch.float32)
    sigma, sigma_next = sigmas[place], sigmas[place + 1]
    kind = sde.SDES[SDE_TYPES[sde_type]]
    transition = kind.step(
        sample, model_output, sigma, sigma_next, noise_level=noise_level, sigma_max=sigmas[1]
    )
    if prev_sample is None:
        prev_sample = transition.mean
        if noise_level:
            noise = randn_tensor(
                sample.shape, generator=generator, device=sample.device, dtype=torch.float32
            )
            prev_sample = sde.sample(transition, noise)
    prev_sample = prev_sample.float()
    log_prob = sde.log_prob(transition, prev_sample, normalised=kind.normalised)
    sqrt_dt = (sigma - sigma_next).sqrt().view_as(transition.std)
    std_dev_t = transition.std / sqrt_dt if sde_type == "sde" else transition.std
    result = (prev_sample, log_prob, transition.mean, std_dev_t)
    return (*result, sqrt_dt) if return_sqrt_dt else result


def _place(scheduler, timestep: float | Tensor, sample: Tensor) -> Tensor:
    """Return the index (b,) of the nearest of the scheduler's timesteps, without a host sync."""
    timesteps = scheduler.timesteps.to(sample.device, torch.float32)
    wanted = torch.as_tensor(timestep, device=sample.device, dtype=torch.float32).reshape(-1, 1)
    return (timesteps - wanted).abs().argmin(dim=1).expand(len(sample))
