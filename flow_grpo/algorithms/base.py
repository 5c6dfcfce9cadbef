"""Define what an algorithm is to the trainer: advantages, rows, a loss."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flow_grpo.models.base import Cond


class Scores(NamedTuple):
    """Hold the scores of all n samples of an epoch, over all ranks, in sample order."""

    values: dict[str, Tensor]  # reward -> (n,) float64, NaN where there is none
    weights: dict[str, float]  # reward -> its weight in the total
    states: dict[str, Tensor]  # reward -> (n,) rewards.base.State
    total: Tensor  # (n,) float64
    valid: Tensor  # (n,) bool
    group_ids: Tensor  # (n,) int64, the group's place in the epoch


class Rows(NamedTuple):
    """Name what is trained, over all ranks: m pairs of a sample and one of its trained steps."""

    sample: Tensor  # (m,) int64, global index of the sample
    step: Tensor  # (m,) int64, place among the trajectory's trained steps


class RowBatch(NamedTuple):
    """Hold b rows, materialised on the device, for one forward and backward."""

    x: Tensor  # (b, *latent) storage dtype
    x_next: Tensor  # (b, *latent) storage dtype
    sigma: Tensor  # (b,) float32
    sigma_next: Tensor  # (b,) float32
    sigma_max: Tensor  # (), the schedule's second sigma
    cond: Cond
    old_log_prob: Tensor  # (b,) float32
    advantage: Tensor  # (b,) float32
    weight: Tensor  # (b,) float32; 0 for padding
    reference_velocity: Tensor | None  # (b, *latent)


class Algorithm(Protocol):
    """Say what to learn from an epoch's samples; one file each."""

    keeps: frozenset[str]  # what a rollout stores: window, reference_velocity, ...

    def advantages(self, scores: Scores) -> Tensor:
        """Return (n,) float64."""

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps: int, generator) -> Rows:
        """Return the global rows to train on, sample-major."""

    def loss(self, policy, rows: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted SUM over rows, and detached metrics per row (b,)."""


def all_pairs(samples: Tensor, num_steps: int) -> Rows:
    """Return every step of every sample, sample-major."""
    steps = torch.arange(num_steps)
    return Rows(samples.repeat_interleave(num_steps), steps.repeat(len(samples)))
