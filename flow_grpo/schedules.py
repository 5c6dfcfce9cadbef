"""Which steps are stochastic, and how the learning rate runs. Sigmas are the scheduler's own."""

import math

import torch

LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine")


def sde_window(
    num_steps: int, size: int, window_range: tuple[int, int], *, generator: torch.Generator
) -> tuple[int, ...]:
    """Draw the indices of the steps that are stochastic and trained; the last step never is.

    size 0: all steps but the last, whatever the range. Otherwise `size` neighbours with a uniform
    start inside window_range (low, high), high excluded; (0, 0) means (0, num_steps - 1).
    Raises ValueError for a window that does not fit.
    """
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
        return tuple(range(last))
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
    start = int(torch.randint(low, high - size + 1, (1,), generator=generator))
    return tuple(range(start, start + size))


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
