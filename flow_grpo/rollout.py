"""Sample trajectories along sigma and keep what training replays."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import sde as steps


class Trajectory(NamedTuple):
    """A batch of trajectories; K = len(trained), T = number of steps."""

    final: Tensor  # x_0 (b, *latent)
    latents: Tensor | None  # (b, K, *latent) storage dtype: x_i for i in trained
    next_latents: Tensor | None  # (b, K, *latent) storage dtype: x_(i+1)
    log_probs: Tensor | None  # (b, K) float32
    reference_velocity: Tensor | None  # (b, K, *latent), if asked for
    sigmas: Tensor  # (T+1,) float32, as used
    trained: tuple[int, ...]


def _check_steps(
    num_steps: int, stochastic: tuple, trained: tuple, noises: Tensor | None, noise_level: float
) -> None:
    for name, indices in (("stochastic", stochastic), ("trained", trained)):
        if list(indices) != sorted(set(indices) & set(range(num_steps))):
            raise ValueError(
                f"{name} steps {indices} must be ascending indices in [0, {num_steps})"
            )
    if not set(trained) <= set(stochastic):
        raise ValueError(
            f"trained steps {trained} must be stochastic, which are {stochastic}; "
            f"the nearest valid are {tuple(i for i in trained if i in stochastic)}"
        )
    if trained and noise_level <= 0:
        raise ValueError(f"noise_level ({noise_level}) must be above 0 where steps are trained")
    num_noises = 0 if noises is None else noises.shape[1]
    if num_noises != len(stochastic):
        raise ValueError(
            f"noises hold {num_noises} steps, but {len(stochastic)} are stochastic: {stochastic}"
        )


@torch.no_grad()
def sample_trajectory(
    velocity: Callable[..., Tensor],
    x: Tensor,
    sigmas: Tensor,
    *,
    sde: steps.SDE | None = None,
    noise_level: float = 0.0,
    stochastic: Sequence[int] = (),
    trained: Sequence[int] = (),
    noises: Tensor | None = None,
    storage_dtype: torch.dtype = torch.float32,
    reference_velocity: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Trajectory:
    """Run x (b, *latent) along sigmas (T+1,): SDE at the stochastic steps, ODE at the others.

    velocity(x, sigma (b,), *, replay) is called with replay=True exactly at the trained steps,
    and there with the very x, in storage_dtype, that is stored. x_next is rounded to storage_dtype
    before its log-prob is taken. noises: (b, len(stochastic), *latent), in the order of the steps.
    reference_velocity(x, sigma) is asked at the trained steps. No gradient is kept.
    Raises ValueError for trained steps that are not stochastic, or without noise.
    """
    stochastic, trained = tuple(stochastic), tuple(trained)
    assert sde is not None or not stochastic, "stochastic steps need an sde"
    num_steps = len(sigmas) - 1
    _check_steps(num_steps, stochastic, trained, noises, noise_level)
    sigmas = sigmas.to(x.device, torch.float32)
    latents, next_latents, log_probs, references = [], [], [], []
    x = x.float()
    for i in range(num_steps):
        sigma, sigma_next = sigmas[i].expand(len(x)), sigmas[i + 1].expand(len(x))
        is_trained = i in trained
        if is_trained:
            x = x.to(storage_dtype)
        v = velocity(x, sigma, replay=is_trained)
        if i not in stochastic:
            x = steps.ode(x, v, sigma, sigma_next)
            continue
        transition = sde.step(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=sigmas[1])
        noise = noises[:, stochastic.index(i)].to(x.device, non_blocking=True)
        x_next = steps.sample(transition, noise)
        if is_trained:
            x_next = x_next.to(storage_dtype)
            latents.append(x)
            next_latents.append(x_next)
            log_probs.append(steps.log_prob(transition, x_next, normalised=sde.normalised))
            if reference_velocity is not None:
                references.append(reference_velocity(x, sigma))
        x = x_next
    stacked = [
        torch.stack(kept, 1) if kept else None
        for kept in (latents, next_latents, log_probs, references)
    ]
    return Trajectory(x, *stacked, sigmas, trained)
