"""Supervised fine-tuning on the best image of each group, offline or online.

Rejection sampling: flow matching on what the collecting ("old") weights made, with a KL between
velocities to the reference. Source: the SFT baseline of Liu et al., arXiv 2505.05470.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from flow_grpo.advantages import best_of_group
from flow_grpo.algorithms.base import (
    RowBatch,
    Rows,
    Scores,
    noise_levels,
    renewed_every,
    trainable,
)
from flow_grpo.losses import flow_matching_error, velocity_kl
from flow_grpo.sde import diffuse


@final
class Sft:
    """Flow matching on a group's images, each with its weight: 1 for the best, 0 for others."""

    rollout_weights = "old"
    keeps = frozenset({"final"})

    def __init__(self, config, *, weigh: Callable[..., Tensor] = best_of_group):
        """Read `train.{kl_coef, old_update_freq, draws_per_sample}`.

        Args:
            config: of the run.
            weigh: (rewards (n,), group_ids (n,), *, valid (n,)) -> weights (n,), not negative.
        """
        self._weigh = weigh
        self.kl_coef = config.train.kl_coef
        self.old_update_freq = config.train.old_update_freq
        self.draws = config.train.draws_per_sample
        self.weights = frozenset({"old", "reference"} if self.kl_coef > 0 else {"old"})

    def old_decay(self, before: int, after: int) -> float:
        """Renew the collecting weights every `old_update_freq` updates."""
        return renewed_every(self.old_update_freq, before, after)

    def advantages(self, scores: Scores) -> Tensor:
        """Return the images' weights (n,), NaN where there is no reward."""
        weights = self._weigh(scores.total, scores.group_ids, valid=scores.valid)
        return torch.where(scores.valid, weights, torch.nan)

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps, sigmas, generator) -> Rows:
        """Return the images of positive weight, `draws` times; under a KL all valid ones."""
        return noise_levels(
            trainable(advantages, self.kl_coef).nonzero(),
            draws=self.draws,
            sigmas=sigmas,
            generator=generator,
            logit_normal=True,
        )

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of weight * flow matching + kl_coef * KL, and metrics."""
        x_0, scale = batch.kept["final"], batch.guidance_scale
        x = diffuse(x_0, batch.noise, batch.sigma)
        if self.kl_coef > 0:
            reference = policy.velocity(x, batch.sigma, batch.cond, scale, weights="reference")
        velocity = policy.velocity(x, batch.sigma, batch.cond, scale)
        error = flow_matching_error(velocity, x_0, batch.noise)
        loss = batch.advantage * error
        metrics = {"flow_matching": error.detach()}
        if self.kl_coef > 0:
            kl = velocity_kl(velocity, reference)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        metrics["loss"] = loss.detach()
        return (loss * batch.weight).sum(), metrics
