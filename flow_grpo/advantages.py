"""Combine rewards and turn them into advantages, in float64, over the samples of all ranks."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray | Sequence

# States of a score, as rewards report them.
OK, NOT_APPLICABLE, FAILED = range(3)


def combine_rewards(
    values: Mapping[str, Array], weights: Mapping[str, Array], states: Mapping[str, Array]
) -> tuple[Tensor, Tensor]:
    """Return (total (n,) float64, valid (n,) bool): each sample's weighted sum of its scores.

    A score that is not applicable adds nothing. A sample is invalid, and its total NaN, if a
    weighted score failed or no weighted score applies. A reward without a weight is only logged.
    Raises ValueError for a weight without scores and for a non-finite score that claims to be ok.
    """
    missing = sorted(set(weights) - set(values))
    if missing:
        raise ValueError(f"rewards {missing} have a weight but no scores; scored: {list(values)}")
    if not values:
        raise ValueError("no reward was scored; at least one is needed")
    size = torch.as_tensor(next(iter(values.values()))).shape
    total = torch.zeros(size, dtype=torch.float64)
    applies, failed = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    for name, weight in weights.items():
        value = torch.as_tensor(values[name], dtype=torch.float64)
        weight = torch.as_tensor(weight, dtype=torch.float64)
        state = torch.as_tensor(states[name])
        counts = (weight != 0) & (state == OK)
        if not value[counts].isfinite().all():
            raise ValueError(f"reward {name!r} has non-finite scores that are not marked as failed")
        total = total + torch.where(counts, value, 0.0) * weight
        applies |= counts
        failed |= (weight != 0) & (state == FAILED)
    valid = applies & ~failed
    return torch.where(valid, total, torch.nan), valid


def _groups(rewards: Array, group_ids: Array, valid: Array | None) -> tuple:
    """Return rewards (0 where invalid), places, valid, and per group count, minimum, maximum."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    group_ids = torch.as_tensor(group_ids)
    if valid is None:
        valid = torch.ones_like(rewards, dtype=torch.bool)
    valid = torch.as_tensor(valid, dtype=torch.bool)
    if not len(rewards) == len(group_ids) == len(valid):
        raise ValueError(
            f"rewards ({len(rewards)}), group_ids ({len(group_ids)}) and valid ({len(valid)}) "
            "must be of equal length"
        )
    if not rewards[valid].isfinite().all():
        raise ValueError("rewards hold non-finite values that are not marked as invalid")
    unique, places = torch.unique(group_ids, return_inverse=True)
    rewards = torch.where(valid, rewards, 0.0)
    zeros = rewards.new_zeros(len(unique))
    count = zeros.index_add(0, places, valid.double())
    low = zeros.scatter_reduce(0, places[valid], rewards[valid], "amin", include_self=False)
    high = zeros.scatter_reduce(0, places[valid], rewards[valid], "amax", include_self=False)
    return rewards, places, valid, count, low, high


def group_advantages(
    rewards: Array,
    group_ids: Array,
    *,
    valid: Array | None = None,
    global_std: bool = False,
    clip: float | None = None,
    epsilon: float = 1e-4,
) -> Tensor:
    """Centre rewards (n,) by group and scale them: (n,) float64.

    (reward - group mean) / (std + epsilon), with the population std of the group's valid members,
    or of all valid rewards with global_std; then clipped to [-clip, clip]. Invalid samples get 0
    and do not count. A group of equal rewards gets exactly 0. group_ids need not be sorted.
    Source: Shao et al. 2024, arXiv 2402.03300.
    """
    rewards, places, valid, count, low, high = _groups(rewards, group_ids, valid)
    count = count.clamp(min=1)
    mean = torch.zeros_like(count).index_add(0, places, rewards) / count
    centred = torch.where(valid, rewards - mean[places], 0.0)
    if global_std:
        kept = rewards[valid]
        std = kept.std(correction=0) if len(kept) else rewards.new_zeros(())
    else:
        variance = torch.zeros_like(count).index_add(0, places, centred.square()) / count
        std = variance.sqrt()[places]
    # Equality of the rewards decides, not a std that rounding leaves at 1e-17.
    advantages = torch.where((high == low)[places], 0.0, centred / (std + epsilon))
    return advantages if clip is None else advantages.clamp(-clip, clip)


def zero_std_groups(rewards: Array, group_ids: Array, valid: Array | None = None) -> float:
    """Return the fraction of groups whose valid rewards are all equal, so that they teach nothing.

    A group with one valid member, or none, is one of them.
    """
    *_, low, high = _groups(rewards, group_ids, valid)
    return float((high == low).double().mean())
