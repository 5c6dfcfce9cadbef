"""Say which steps of an epoch's trajectories are stochastic, which are trained, where they branch.

Functions of the configuration and the epoch alone, so every rank and every resume agrees.
"""

from typing import NamedTuple

from flow_grpo import seeds
from flow_grpo.schedules import WINDOW_STRATEGIES, sde_window, sliding_window, trained_steps


class EpochSteps(NamedTuple):
    """Indices of denoising steps, ascending; `trained` is a part of `stochastic`."""

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]
    sharing: int  # members of a group that share their initial noise; 1 = each has its own
    prefix: int  # first steps, all ODE, that are run once for the members that share


def epoch_steps(config, epoch: int, *, trains_steps: bool) -> EpochSteps:
    """Return the steps of an epoch.

    Args:
        config: reads `seed`, `sample.{num_steps, noise_level, sde_window_*, branching}` and
            `train.timestep_fraction`.
        epoch: counted from 0.
        trains_steps: whether the algorithm learns from single steps; if not, none is trained.

    Raises:
        ValueError: the window does not fit.
    """
    sample = config.sample
    sharing = (sample.mini_group_size or sample.group_size) if sample.same_latent else 1
    if sample.noise_level == 0:
        return EpochSteps((), (), sharing, 0)
    stochastic = _window(config, epoch)
    trained = ()
    if trains_steps:
        trained = trained_steps(
            stochastic,
            num_steps=sample.num_steps,
            fraction=config.train.timestep_fraction,
            generator=seeds.generator(config.seed, seeds.TRAINED_STEPS, epoch),
        )
    return EpochSteps(stochastic, trained, sharing, stochastic[0] if sample.branching else 0)


def _window(config, epoch: int) -> tuple[int, ...]:
    sample = config.sample
    window = {
        "num_steps": sample.num_steps,
        "size": sample.sde_window_size,
        "window_range": tuple(sample.sde_window_range),
    }
    # Of size 0 neither range nor strategy counts: one flag switches a preset's window off.
    if window["size"] == 0 or sample.sde_window_strategy == "random":
        return sde_window(**window, generator=seeds.generator(config.seed, seeds.WINDOW, epoch))
    strategy = sample.sde_window_strategy
    decays = strategy == "exp_decay"
    return sliding_window(
        epoch,
        **window,
        strategy=strategy,
        epochs_per_place=sample.sde_window_epochs,
        shift=sample.sde_window_shift,
        roll_back=sample.sde_window_roll_back,
        decay=sample.sde_window_decay if decays else 0.0,
        decay_from=sample.sde_window_decay_from if decays else 0,
    )


def check_steps(config, *, trains_steps: bool) -> None:
    """Raise ValueError, with the nearest valid value, for steps that no epoch could have."""
    sample = config.sample
    if trains_steps and not sample.noise_level > 0:
        raise ValueError(
            f"sample.noise_level ({sample.noise_level}) must be above 0 for algorithm "
            f"{config.algorithm!r}: without noise a step has no log-probability; published values "
            "are 0.7 to 0.9"
        )
    if sample.sde_type == "cps" and sample.noise_level > 1:
        raise ValueError(
            f"sample.noise_level ({sample.noise_level}) must be at most 1 for cps, whose noise is "
            "sin(noise_level * pi / 2); the nearest valid is 1"
        )
    if sample.sde_window_strategy not in WINDOW_STRATEGIES:
        raise ValueError(
            f"sample.sde_window_strategy ({sample.sde_window_strategy!r}) must be one of "
            f"{', '.join(WINDOW_STRATEGIES)}"
        )
    window_range = tuple(sample.sde_window_range) if sample.sde_window_size else (0, 0)
    if len(window_range) != 2 or not all(isinstance(place, int) for place in window_range):
        raise ValueError(
            f"sample.sde_window_range {window_range} must be two step indices, such as "
            f"(0, {sample.num_steps - 1})"
        )
    if sample.branching and not sample.same_latent:
        raise ValueError(
            "sample.branching runs the steps before the window once for members of equal initial "
            "noise, but sample.same_latent is False, so each has its own; set sample.same_latent "
            "to True"
        )
    if sample.branching and not (sample.sde_window_size and sample.noise_level):
        raise ValueError(
            "sample.branching needs a window to branch at: set sample.sde_window_size (1 or 2) "
            "and sample.noise_level"
        )
    _check_mini_groups(sample)


def _check_mini_groups(sample) -> None:
    if not sample.same_latent:
        return
    size, group = sample.mini_group_size, sample.group_size
    if size < 0 or (size and group % size):
        divisors = [d for d in range(1, group + 1) if group % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - size))
        raise ValueError(
            f"sample.mini_group_size ({size}) must divide sample.group_size ({group}), or be 0 "
            f"for the whole group; the nearest valid is {nearest}"
        )
