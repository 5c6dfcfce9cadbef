"""Turn global numbers and a world size into each rank's batches; divisibility errors end here."""

import math
from typing import NamedTuple


class BatchPlan(NamedTuple):
    """The geometry of an epoch."""

    world_size: int
    groups_per_epoch: int
    group_size: int
    updates_per_epoch: int
    batch_size: int  # samples of one forward, per rank
    samples_per_epoch: int
    samples_per_rank: int
    rollout_batches: int  # forwards of batch_size that make an epoch, per rank


def plan_batches(
    *,
    groups_per_epoch: int,
    group_size: int,
    updates_per_epoch: int,
    batch_size: int,
    world_size: int,
) -> BatchPlan:
    """Plan an epoch; batch_size is an upper limit, the largest divisor below it is taken.

    Raises ValueError for numbers that are not positive, a group of one, more updates than samples,
    and samples that do not divide over the ranks.
    """
    given = {
        "groups_per_epoch": groups_per_epoch,
        "updates_per_epoch": updates_per_epoch,
        "batch_size": batch_size,
        "world_size": world_size,
    }
    for name, number in given.items():
        if number < 1:
            raise ValueError(f"{name} ({number}) must be positive; the nearest valid {name} is 1")
    if group_size < 2:
        raise ValueError(
            f"group_size ({group_size}) leaves a sample nothing to be compared with; "
            "the nearest valid group_size is 2"
        )
    samples = groups_per_epoch * group_size
    if samples % world_size:
        unit = world_size // math.gcd(group_size, world_size)
        nearest = max(unit, math.floor(groups_per_epoch / unit + 0.5) * unit)
        raise ValueError(
            f"groups_per_epoch ({groups_per_epoch}) * group_size ({group_size}) = {samples} "
            f"samples do not divide over world_size ({world_size}); "
            f"the nearest valid groups_per_epoch is {nearest}"
        )
    if updates_per_epoch > samples:
        raise ValueError(
            f"updates_per_epoch ({updates_per_epoch}) is more than the {samples} samples of an "
            f"epoch; the nearest valid updates_per_epoch is {samples}"
        )
    per_rank = samples // world_size
    batch_size = max(d for d in range(1, min(batch_size, per_rank) + 1) if per_rank % d == 0)
    return BatchPlan(
        world_size=world_size,
        groups_per_epoch=groups_per_epoch,
        group_size=group_size,
        updates_per_epoch=updates_per_epoch,
        batch_size=batch_size,
        samples_per_epoch=samples,
        samples_per_rank=per_rank,
        rollout_batches=per_rank // batch_size,
    )


def deal(num_items: int, world_size: int, rank: int) -> range:
    """Return a rank's contiguous share of items; the first ranks take what does not divide."""
    assert 0 <= rank < world_size, (rank, world_size)
    share, rest = divmod(num_items, world_size)
    start = rank * share + min(rank, rest)
    return range(start, start + share + (rank < rest))
