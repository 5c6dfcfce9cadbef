"""Define what an algorithm is to the trainer: advantages, rows, a loss."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flow_grpo.models.base import Cond

# What a rollout stores for an algorithm that `keeps` it: fields of rollout.Trajectory.
KEPT = {
    "window": ("latents", "next_latents", "log_probs"),
    "final": ("final",),
    "old_mean": ("old_means",),
    "reference_velocity": ("reference_velocity",),
}
PER_SAMPLE = frozenset({"final"})  # the other fields have a second axis: the trained steps


class Scores(NamedTuple):
    """Hold the scores of all n samples of an epoch, over all ranks, in sample order."""

    values: dict[str, Tensor]  # reward -> (n,) float64, NaN where there is none
    weights: dict[str, Tensor]  # reward -> (n,) float64, its weight in the sample's total
    states: dict[str, Tensor]  # reward -> (n,) rewards.base.State
    total: Tensor  # (n,) float64
    valid: Tensor  # (n,) bool
    group_ids: Tensor  # (n,) int64, the group's place in the epoch


class Rows(NamedTuple):
    """Name what is trained, over all ranks: m rows of r samples each (a pair has two).

    Columns are the algorithm's own. Two have a meaning to the trainer: `step`, the place among the
    trajectory's trained steps, and `draw`, which with the row's first sample names its noise.
    """

    samples: Tensor  # (m, r) int64, global indices
    columns: dict[str, Tensor]  # name -> (m,)

    def pick(self, index: Tensor) -> "Rows":
        """Return the rows `index`: int64 places, or a mask (m,)."""
        return Rows(self.samples[index], {n: column[index] for n, column in self.columns.items()})


class RowBatch(NamedTuple):
    """Hold b rows of r samples, materialised on the device, for one forward and backward.

    What belongs to samples has r * b entries: those of all rows' first samples, then of the second.
    """

    cond: Cond  # r * b
    kept: dict[str, Tensor]  # trajectory field -> (r * b, ...), the row's step where it has steps
    advantage: Tensor  # (r * b,) float32
    weight: Tensor  # (b,) float32; 0 for padding
    columns: dict[str, Tensor]  # (b,)
    sigma: Tensor  # (b,) float32: the step's, or the column of that name
    sigma_next: Tensor | None  # (b,) float32, of rows with a step
    sigma_max: Tensor  # (), the schedule's second sigma
    noise: Tensor | None  # (b, *latent) float32, of rows with a draw
    guidance_scale: float = 1.0  # of losses on noised images: 1, or what the model is told


class Algorithm(Protocol):
    """Say what to learn from an epoch's samples; one file each."""

    keeps: frozenset[str]  # names of KEPT
    weights: frozenset[str]  # which other weights it asks the policy for: "reference", "old"
    rollout_weights: str  # whose samples it learns from: "current" or "old"

    def old_decay(self, before: int, after: int) -> float:
        """Return the share that the old weights keep when updates before..after - 1 are done."""

    def advantages(self, scores: Scores) -> Tensor:
        """Return (n,) float64; NaN for a sample that must not be trained on."""

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps, sigmas, generator) -> Rows:
        """Return the global rows to train on, sample-major.

        Args:
            advantages: (n,).
            scores: of the epoch.
            num_steps: trained steps of a trajectory.
            sigmas: the schedule's noise levels to draw from, descending.
            generator: the same on every rank.
        """

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted SUM over rows, and detached metrics per row (b,).

        Velocities of other weights must be asked for first: they are swapped in place, which
        the graph of a forward before its backward does not survive.
        """


def renewed_every(freq: int, before: int, after: int) -> float:
    """Return 0 if a multiple of `freq` updates was passed between before and after, else 1."""
    return 0.0 if freq and before // freq < after // freq else 1.0


def trainable(advantages: Tensor, kl_coef: float) -> Tensor:
    """Return which samples (n,) have something to teach: valid, and of no zero advantage.

    Under a KL those of zero advantage count too: it has a gradient for them.
    """
    return advantages.isfinite() & ((advantages != 0) | (kl_coef > 0))


def all_steps(samples: Tensor, num_steps: int) -> Rows:
    """Return every trained step of every sample (u,), sample-major."""
    steps = torch.arange(num_steps)
    return Rows(samples.repeat_interleave(num_steps)[:, None], {"step": steps.repeat(len(samples))})


def noise_levels(
    samples: Tensor, *, draws: int, sigmas: Tensor, generator: torch.Generator, logit_normal: bool
) -> Rows:
    """Return each row of samples (u, r) `draws` times, with columns `draw` and `sigma`.

    A level is an entry of `sigmas` at a relative place that is logit-normal (Esser et al. 2024,
    arXiv 2403.03206) or uniform.
    """
    num = len(samples) * draws
    if logit_normal:
        place = torch.randn(num, generator=generator).sigmoid()
    else:
        place = torch.rand(num, generator=generator)
    index = (place * len(sigmas)).long().clamp(max=len(sigmas) - 1)
    return Rows(
        samples.repeat_interleave(draws, 0),
        {"draw": torch.arange(draws).repeat(len(samples)), "sigma": sigmas.cpu()[index]},
    )
