"""Which steps are stochastic or trained, and how the learning rate runs."""

import itertools
import math
from collections.abc import Sequence

import torch

WINDOW_STRATEGIES = ("random", "progressive", "decay", "exp_decay")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")


def sde_window(
    num_steps: int, size: int, window_range: tuple[int, int], *, generator: torch.Generator
) -> tuple[int, ...]:
    """Draw the indices of the steps that are stochastic and trained; the last step never is.

    size 0: all steps but the last, whatever the range. Otherwise `size` neighbours with a uniform
    start inside window_range (low, high), high excluded; (0, 0) means (0, num_steps - 1).
    Raises ValueError for a window that does not fit.
    """
    starts = _window_starts(num_steps, size, window_range)
    if size == 0:
        return tuple(range(num_steps - 1))
    start = int(torch.randint(starts.start, starts.stop, (1,), generator=generator))
    return tuple(range(start, start + size))


def _window_starts(num_steps: int, size: int, window_range: tuple[int, int]) -> range:
    """Return where a window may start; size 0 has the one start 0."""
    last = num_steps - 1
    if num_steps < 2:
        raise ValueError(
            f"num_steps ({num_steps}) leaves no step to train, the last one never is; "
            "the nearest valid num_steps is 2"
        )
    if size < 0:
        raise ValueError(
            f"window size ({size}) is negative; 0 (all steps but the last) is the nearest valid"
        )
    if size == 0:
        return range(1)
    low, high = (0, last) if tuple(window_range) == (0, 0) else window_range
    if not 0 <= low < high <= last:
        nearest_high = min(max(high, 1), last)
        nearest_low = min(max(low, 0), nearest_high - 1)
        raise ValueError(
            f"window range ({low}, {high}) is not inside (0, {last}), the steps before the last of "
            f"num_steps ({num_steps}); the nearest valid range is ({nearest_low}, {nearest_high})"
        )
    if size > high - low:
        raise ValueError(
            f"window size ({size}) does not fit into window range ({low}, {high}); "
            f"the nearest valid size is {high - low}"
        )
    return range(low, high - size + 1)


def sliding_window(
    epoch: int,
    *,
    num_steps: int,
    size: int,
    window_range: tuple[int, int],
    strategy: str,
    epochs_per_place: int,
    shift: int,
    roll_back: bool,
    decay: float,
    decay_from: int,
) -> tuple[int, ...]:
    """Return the window of an epoch: it walks through window_range, towards less noise.

    Its starts are low, low + shift, ... and last high - size. After the last place's stay it
    begins anew (roll_back) or remains there. See _stay for how long it stays; window_range as in
    sde_window. Raises ValueError for a window that does not fit or does not move.
    Source: MixGRPO, arXiv 2507.21802.
    """
    starts = _window_starts(num_steps, size, window_range)
    if size == 0:
        raise ValueError(
            f"window size (0) takes all steps but the last, which cannot slide ({strategy}); "
            "the nearest valid size is 1"
        )
    for name, value in (("epochs_per_place", epochs_per_place), ("shift", shift)):
        if value < 1:
            raise ValueError(f"a sliding window's {name} ({value}) must be at least 1")
    if not decay >= 0:
        raise ValueError(f"a sliding window's decay ({decay}) must not be below 0")
    places = [*starts[:-1:shift], starts[-1]]
    stays = [
        _stay(strategy, start, epochs_per_place, num_steps, decay, decay_from) for start in places
    ]
    if roll_back:
        epoch %= sum(stays)
    ends = itertools.accumulate(stays)
    start = next((start for start, end in zip(places, ends) if epoch < end), places[-1])
    return tuple(range(start, start + size))


def _stay(
    strategy: str, start: int, epochs: int, num_steps: int, decay: float, decay_from: int
) -> int:
    """Return for how many epochs a window stays at a start index, at least 1.

    "progressive": epochs. "decay": falls linearly in start / num_steps towards a quarter.
    "exp_decay": falls by exp(-decay) with every start beyond decay_from.
    """
    if strategy == "progressive":
        return epochs
    if strategy == "decay":
        shortest = max(1, epochs // 4)
        return (epochs * (num_steps - start) + shortest * start) // num_steps
    if strategy == "exp_decay":
        return max(1, math.ceil(epochs * math.exp(-decay * max(0, start - decay_from))))
    raise ValueError(
        f"window strategy ({strategy!r}) does not slide; "
        f"those that do are {', '.join(WINDOW_STRATEGIES[1:])}"
    )


def trained_steps(
    stochastic: Sequence[int], *, num_steps: int, fraction: float, generator: torch.Generator
) -> tuple[int, ...]:
    """Draw which of the stochastic steps are trained: ascending, without replacement.

    Their number is fraction * num_steps rounded down, at least 1 and at most all of them.
    Raises ValueError for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        nearest = 1.0 if fraction > 1 else 1 / num_steps
        raise ValueError(
            f"timestep fraction ({fraction}) must be in (0, 1]; the nearest valid is {nearest:g}"
        )
    # 0.29 * 100 is a little less than 29.
    number = max(1, math.floor(num_steps * fraction + 1e-9))
    drawn = torch.randperm(len(stochastic), generator=generator)[:number]
    return tuple(sorted(stochastic[i] for i in drawn.tolist()))


def learning_rate(
    update: int, *, peak: float, warmup_updates: int, total_updates: int, schedule: str
) -> float:
    """Return the learning rate of the update-th optimizer step, counted from 0.

    Rises linearly to peak over warmup_updates (the first update already moves), then stays there
    ("constant") or falls to 0 at total_updates ("linear", "cosine").
    """
    if schedule not in LEARNING_RATE_SCHEDULES:
        raise ValueError(
            f"learning rate schedule ({schedule!r}) is unknown; "
            f"allowed are {', '.join(LEARNING_RATE_SCHEDULES)}"
        )
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    if total_updates <= warmup_updates:
        raise ValueError(
            f"warmup_updates ({warmup_updates}) leaves no update of total_updates "
            f"({total_updates}) to decay in; the nearest valid is {max(total_updates - 1, 0)}"
        )
    progress = min((update - warmup_updates) / (total_updates - warmup_updates), 1.0)
    if schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
