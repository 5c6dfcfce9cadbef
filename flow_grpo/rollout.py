"""Sample trajectories along sigma and keep what training replays."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import sde as steps


class Trajectory(NamedTuple):
    """A batch of trajectories; K = len(trained), T = number of steps."""

    final: Tensor  # (b, *latent): x_0, or where the run ended before it
    latents: Tensor | None  # (b, K, *latent) storage dtype: x_i for i in trained
    next_latents: Tensor | None  # (b, K, *latent) storage dtype: x_(i+1)
    log_probs: Tensor | None  # (b, K) float32
    reference_velocity: Tensor | None  # (b, K, *latent), if asked for
    old_means: Tensor | None  # (b, K, *latent) float32, if asked for
    sigmas: Tensor  # (T+1,) float32, as used
    trained: tuple[int, ...]


def _check_steps(
    run: range, stochastic: tuple, trained: tuple, noises: Tensor | None, noise_level: float
) -> None:
    for name, indices in (("stochastic", stochastic), ("trained", trained)):
        if list(indices) != sorted(set(indices) & set(run)):
            raise ValueError(
                f"{name} steps {indices} must be ascending indices in [{run.start}, {run.stop})"
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


def _checked_run(num_steps: int, first: int, last: int | None) -> range:
    last = num_steps if last is None else last
    if not 0 <= first <= last <= num_steps:
        nearest = sorted((min(max(first, 0), num_steps), min(max(last, 0), num_steps)))
        raise ValueError(
            f"steps [{first}, {last}) are not a part of [0, {num_steps}); "
            f"the nearest valid are [{nearest[0]}, {nearest[1]})"
        )
    return range(first, last)


def _check_solver(solver: str) -> None:
    if solver not in steps.SOLVERS:
        raise ValueError(f"solver ({solver!r}) is unknown; allowed are {', '.join(steps.SOLVERS)}")


class _Past(NamedTuple):
    """What a multistep solver remembers of its last step."""

    x_0: Tensor | None = None
    sigma: Tensor | None = None


def _solve(
    solver: str, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, past: _Past
) -> tuple[Tensor, _Past]:
    if solver == "euler":
        return steps.ode(x, v, sigma, sigma_next), past
    x_next = steps.dpm2m(x, v, sigma, sigma_next, previous=past.x_0, sigma_previous=past.sigma)
    return x_next, _Past(steps.predicted_x_0(x, v, sigma), sigma)


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
    keep_means: bool = False,
    solver: str = "euler",
    first: int = 0,
    last: int | None = None,
) -> Trajectory:
    """Run x (b, *latent) along sigmas (T+1,): SDE at the stochastic steps, ODE at the others.

    velocity(x, sigma (b,), *, replay) is called with replay=True exactly at the trained steps,
    and there with the very x, in storage_dtype, that is stored. x_next is rounded to storage_dtype
    before its log-prob is taken. noises: (b, len(stochastic), *latent), in the order of the steps.
    reference_velocity(x, sigma) is asked at the trained steps. Only the steps first..last-1 are
    run, and x is the state at `first`. The solver of the steps without noise forgets at `first`
    and at stochastic steps what it did before. No gradient is kept.
    Raises ValueError for trained steps that are not stochastic, or without noise.
    """
    stochastic, trained = tuple(stochastic), tuple(trained)
    assert sde is not None or not stochastic, "stochastic steps need an sde"
    _check_solver(solver)
    run = _checked_run(len(sigmas) - 1, first, last)
    _check_steps(run, stochastic, trained, noises, noise_level)
    sigmas = sigmas.to(x.device, torch.float32)
    kept = {name: [] for name in Trajectory._fields[1:6]}
    x, past = x.float(), _Past()
    for i in run:
        sigma, sigma_next = sigmas[i].expand(len(x)), sigmas[i + 1].expand(len(x))
        is_trained = i in trained
        if is_trained:
            x = x.to(storage_dtype)
        v = velocity(x, sigma, replay=is_trained)
        if i not in stochastic:
            x, past = _solve(solver, x, v, sigma, sigma_next, past)
            continue
        step = sde.step(x, v, sigma, sigma_next, noise_level=noise_level, sigma_max=sigmas[1])
        noise = noises[:, stochastic.index(i)].to(x.device, non_blocking=True)
        x_next = steps.sample(step, noise)
        if is_trained:
            x_next = x_next.to(storage_dtype)
            kept["latents"].append(x)
            kept["next_latents"].append(x_next)
            kept["log_probs"].append(steps.log_prob(step, x_next, normalised=sde.normalised))
            if reference_velocity is not None:
                kept["reference_velocity"].append(reference_velocity(x, sigma))
            if keep_means:
                kept["old_means"].append(step.mean)
        x, past = x_next, _Past()
    stacked = {name: torch.stack(each, 1) if each else None for name, each in kept.items()}
    return Trajectory(final=x, sigmas=sigmas, trained=trained, **stacked)
