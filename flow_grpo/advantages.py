"""Combine rewards and turn them into advantages, in float64, over the samples of all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = Tensor | np.ndarray | Sequence

# States of a score, as rewards report them.
OK, NOT_APPLICABLE, FAILED = range(3)


def _weighted_scores(
    values: Mapping[str, Array], weights: Mapping[str, Array], states: Mapping[str, Array]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Yield every weighted reward's name, value, weight, and where it counts and where it failed.

    The value is 0 where the score does not count: it is not ok, or its weight is 0.
    """
    missing = sorted(set(weights) - set(values))
    if missing:
        raise ValueError(f"rewards {missing} have a weight but no scores; scored: {list(values)}")
    for name, weight in weights.items():
        value = torch.as_tensor(values[name], dtype=torch.float64)
        weight = torch.as_tensor(weight, dtype=torch.float64)
        state = torch.as_tensor(states[name])
        counts = (weight != 0) & (state == OK)
        if not value[counts].isfinite().all():
            raise ValueError(f"reward {name!r} has non-finite scores that are not marked as failed")
        failed = (weight != 0) & (state == FAILED)
        yield name, torch.where(counts, value, 0.0), weight, counts, failed


def _no_samples(values: Mapping[str, Array]) -> tuple[Tensor, Tensor]:
    """Return zeros (n,) float64 and (n,) bool to gather scores in."""
    if not values:
        raise ValueError("no reward was scored; at least one is needed")
    size = torch.as_tensor(next(iter(values.values()))).shape
    return torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.bool)


def combine_rewards(
    values: Mapping[str, Array], weights: Mapping[str, Array], states: Mapping[str, Array]
) -> tuple[Tensor, Tensor]:
    """Return (total (n,) float64, valid (n,) bool): each sample's weighted sum of its scores.

    A score that is not applicable adds nothing. A sample is invalid, and its total NaN, if a
    weighted score failed or no weighted score applies. A reward without a weight is only logged.
    Raises ValueError for a weight without scores and for a non-finite score that claims to be ok.
    """
    scores = list(_weighted_scores(values, weights, states))
    total, applies = _no_samples(values)
    any_failed = torch.zeros_like(applies)
    for _, value, weight, counts, failed in scores:
        total = total + value * weight
        applies = applies | counts
        any_failed = any_failed | failed
    valid = applies & ~any_failed
    return torch.where(valid, total, torch.nan), valid


class _Groups(NamedTuple):
    rewards: Tensor  # (n,) float64, 0 where invalid
    valid: Tensor  # (n,) bool
    places: Tensor  # (n,) the group's place among the sorted groups
    num_valid: Tensor  # (groups,) float64, of valid members
    low: Tensor  # (groups,) of the valid rewards; 0 without any
    high: Tensor

    def equal(self) -> Tensor:
        """Return (n,) bool: the valid rewards of the sample's group are all equal.

        Their equality decides, not a std that rounding leaves at 1e-17.
        """
        return (self.high == self.low)[self.places]

    def sum(self, values: Tensor) -> Tensor:
        """Sum (n,) by group: (groups,)."""
        return torch.zeros_like(self.num_valid).index_add(0, self.places, values)

    def centred(self) -> Tensor:
        """Return the rewards minus their group's mean: (n,), 0 where invalid."""
        mean = self.sum(self.rewards) / self.num_valid.clamp(min=1)
        return torch.where(self.valid, self.rewards - mean[self.places], 0.0)

    def std(self, *, correction: int) -> Tensor:
        """Return the std of the sample's group: (n,)."""
        square = self.sum(self.centred().square())
        return (square / (self.num_valid - correction).clamp(min=1)).sqrt()[self.places]


def _groups(rewards: Array, group_ids: Array, valid: Array | None) -> _Groups:
    """Sort samples into groups; ValueError for lengths that differ and for non-finite rewards."""
    rewards, valid = _checked(rewards, valid)
    group_ids = torch.as_tensor(group_ids)
    if len(rewards) != len(group_ids):
        raise ValueError(
            f"rewards ({len(rewards)}) and group_ids ({len(group_ids)}) must be of equal length"
        )
    unique, places = torch.unique(group_ids, return_inverse=True)
    zeros = rewards.new_zeros(len(unique))
    count = zeros.index_add(0, places, valid.double())
    low = zeros.scatter_reduce(0, places[valid], rewards[valid], "amin", include_self=False)
    high = zeros.scatter_reduce(0, places[valid], rewards[valid], "amax", include_self=False)
    return _Groups(rewards, valid, places, count, low, high)


def _checked(rewards: Array, valid: Array | None) -> tuple[Tensor, Tensor]:
    """Return rewards (n,) float64, 0 where invalid, and valid (n,) bool."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if valid is None:
        valid = torch.ones_like(rewards, dtype=torch.bool)
    valid = torch.as_tensor(valid, dtype=torch.bool)
    if len(rewards) != len(valid):
        raise ValueError(
            f"rewards ({len(rewards)}) and valid ({len(valid)}) must be of equal length"
        )
    if not rewards[valid].isfinite().all():
        raise ValueError("rewards hold non-finite values that are not marked as invalid")
    return torch.where(valid, rewards, 0.0), valid


def _clipped(advantages: Tensor, clip: float | None) -> Tensor:
    return advantages if clip is None else advantages.clamp(-clip, clip)


def _over_all(values: Tensor, valid: Tensor, *, correction: int, epsilon: float) -> Tensor:
    """Centre and scale values (n,) by all valid ones: exactly 0 if those are equal."""
    kept = values[valid]
    if not len(kept) or kept.min() == kept.max():
        return torch.zeros_like(values)
    scaled = (values - kept.mean()) / (kept.std(correction=correction) + epsilon)
    return torch.where(valid, scaled, 0.0)


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
    groups = _groups(rewards, group_ids, valid)
    if global_std:
        kept = groups.rewards[groups.valid]
        std = kept.std(correction=0) if len(kept) else kept.new_zeros(())
    else:
        std = groups.std(correction=0)
    advantages = torch.where(groups.equal(), 0.0, groups.centred() / (std + epsilon))
    return _clipped(advantages, clip)


def gdpo_advantages(
    values: Mapping[str, Array],
    weights: Mapping[str, Array],
    states: Mapping[str, Array],
    group_ids: Array,
    *,
    clip: float | None = None,
    epsilon: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Scale every reward by itself in its group, then add: (advantages (n,) float64, valid (n,)).

    (score - group mean) / (std + epsilon) of each reward, over the group's members whose score is
    ok and weighted; their weighted sum is centred and scaled again over all valid samples, then
    clipped to [-clip, clip]. Both stds are of a sample (n - 1). A score that failed or is not
    applicable adds nothing and does not count; a sample without any other is invalid and gets 0.
    So does, exactly, a sample none of whose scores differ in its group. Raises as combine_rewards.
    Source: GDPO, arXiv 2601.05242.
    """
    total, valid = _no_samples(values)
    differs = torch.zeros_like(valid)
    for _, value, weight, counts, _ in _weighted_scores(values, weights, states):
        groups = _groups(value, group_ids, counts)
        equal = groups.equal()
        scaled = groups.centred() / (groups.std(correction=1) + epsilon)
        total = total + torch.where(equal, 0.0, scaled * weight)
        valid = valid | counts
        differs = differs | (counts & ~equal)
    advantages = _over_all(total, valid, correction=1, epsilon=epsilon)
    # Without the mask the mean's rounding would turn zeros into 1e-17.
    return _clipped(torch.where(differs, advantages, 0.0), clip), valid


def zero_variance_rewards(
    values: Mapping[str, Array],
    weights: Mapping[str, Array],
    states: Mapping[str, Array],
    group_ids: Array,
) -> list[str]:
    """Name the rewards whose weighted scores are equal within every group: they teach nothing.

    A reward without any weighted score that is ok is not one of them: it did not take part.
    """
    names = []
    for name, value, _, counts, _ in _weighted_scores(values, weights, states):
        if counts.any() and _groups(value, group_ids, counts).equal().all():
            names.append(name)
    return names


def reinforce_advantages(
    rewards: Array,
    *,
    valid: Array | None = None,
    clip: float | None = None,
    epsilon: float = 1e-4,
) -> Tensor:
    """Centre and scale rewards (n,) by the mean and population std of all valid ones: (n,) float64.

    Then clipped to [-clip, clip]. Invalid samples get 0; so do, exactly, rewards that are all
    equal. Source: REINFORCE++, arXiv 2501.03262.
    """
    rewards, valid = _checked(rewards, valid)
    return _clipped(_over_all(rewards, valid, correction=0, epsilon=epsilon), clip)


def best_of_group(rewards: Array, group_ids: Array, *, valid: Array | None = None) -> Tensor:
    """Mark each group's best samples: (n,) float64, 1 at the maximum (every tie), else 0.

    Invalid samples and groups of equal rewards get 0.
    """
    groups = _groups(rewards, group_ids, valid)
    best = groups.valid & ~groups.equal() & (groups.rewards == groups.high[groups.places])
    return best.double()


def group_softmax(
    rewards: Array, group_ids: Array, *, temperature: float, valid: Array | None = None
) -> Tensor:
    """Weigh samples by the softmax of rewards / temperature in their group: (n,) float64, mean 1.

    The mean is over the group's valid members. Invalid samples and groups of equal rewards get 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    groups = _groups(rewards, group_ids, valid)
    exponent = (groups.rewards - groups.high[groups.places]) / temperature
    taught = groups.valid & ~groups.equal()
    share = torch.where(taught, exponent.exp(), 0.0)
    mean = groups.sum(share) / groups.num_valid
    return torch.where(taught, share / mean[groups.places], 0.0)


def preference_pairs(
    rewards: Array, group_ids: Array, *, valid: Array | None = None
) -> tuple[Tensor, Tensor]:
    """Return (winners (p,), losers (p,)) int64: a sample of the highest and of the lowest reward.

    One pair per group whose valid rewards differ, in order of group_ids; of ties the first sample.
    """
    groups = _groups(rewards, group_ids, valid)
    samples = torch.arange(len(groups.rewards))
    beyond = torch.full_like(groups.num_valid, len(samples), dtype=torch.int64)

    def first(extreme: Tensor) -> Tensor:
        found = groups.valid & (groups.rewards == extreme[groups.places])
        return beyond.scatter_reduce(0, groups.places[found], samples[found], "amin")

    unequal = groups.high != groups.low
    return first(groups.high)[unequal], first(groups.low)[unequal]


def zero_std_groups(rewards: Array, group_ids: Array, valid: Array | None = None) -> float:
    """Return the fraction of groups whose valid rewards are all equal, so that they teach nothing.

    A group with one valid member, or none, is one of them.
    """
    groups = _groups(rewards, group_ids, valid)
    return float((groups.high == groups.low).double().mean())
