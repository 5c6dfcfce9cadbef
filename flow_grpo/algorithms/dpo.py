"""Diffusion-DPO on the best and the worst image of each group, offline or online.

The collecting ("old") weights are both what samples and what the loss compares with; online, they
are renewed every `train.old_update_freq` updates.
Source: Wallace et al., arXiv 2311.12908; Flow-DPO, arXiv 2501.13918.
"""

from typing import final

import torch
from torch import Tensor

from flow_grpo.advantages import preference_pairs
from flow_grpo.algorithms.base import RowBatch, Rows, Scores, noise_levels, renewed_every
from flow_grpo.losses import dpo_loss, flow_matching_error
from flow_grpo.sde import diffuse


@final
class Dpo:
    """Prefer a group's best image over its worst, by their flow-matching errors."""

    rollout_weights = "old"
    keeps = frozenset({"final"})
    weights = frozenset({"old"})

    def __init__(self, config):
        """Read `train.{dpo_beta, old_update_freq, draws_per_sample, updates_per_epoch}`.

        Raises:
            ValueError: more updates an epoch than groups, of which each has one pair.
        """
        groups, updates = config.sample.groups_per_epoch, config.train.updates_per_epoch
        if updates > groups:
            raise ValueError(
                f"train.updates_per_epoch ({updates}) is more than the {groups} pairs that "
                f"{groups} groups make; the nearest valid updates_per_epoch is {groups}"
            )
        self.beta = config.train.dpo_beta
        self.old_update_freq = config.train.old_update_freq
        self.draws = config.train.draws_per_sample

    def old_decay(self, before: int, after: int) -> float:
        """Renew the collecting weights every `old_update_freq` updates."""
        return renewed_every(self.old_update_freq, before, after)

    def advantages(self, scores: Scores) -> Tensor:
        """Return 1 for a winner, -1 for a loser, NaN for all others."""
        winners, losers = preference_pairs(scores.total, scores.group_ids, valid=scores.valid)
        advantages = torch.full_like(scores.total, torch.nan)
        advantages[winners], advantages[losers] = 1.0, -1.0
        return advantages

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps, sigmas, generator) -> Rows:
        """Return (winner, loser) of every group whose rewards differ, `draws` times."""
        winners, losers = (advantages > 0).nonzero(), (advantages < 0).nonzero()
        return noise_levels(
            torch.cat([winners, losers], 1),  # both in the order of the groups
            draws=self.draws,
            sigmas=sigmas,
            generator=generator,
            logit_normal=True,
        )

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of -log sigmoid, and metrics; a pair shares noise and level."""
        x_0 = batch.kept["final"]
        noise, sigma = torch.cat([batch.noise] * 2), torch.cat([batch.sigma] * 2)
        x = diffuse(x_0, noise, sigma)
        old = self._errors(policy, batch, x, sigma, noise, weights="old")
        new = self._errors(policy, batch, x, sigma, noise, weights="current")
        loss, inside = dpo_loss(*new, *old, beta=self.beta)
        metrics = {
            "loss": loss.detach(),
            "winner_error": new[0].detach(),
            "loser_error": new[1].detach(),
            "winner_change": (new[0] - old[0]).detach(),
            "loser_change": (new[1] - old[1]).detach(),
            "implicit_accuracy": (inside.detach() > 0).float(),
        }
        return (loss * batch.weight).sum(), metrics

    @staticmethod
    def _errors(policy, batch: RowBatch, x, sigma, noise, *, weights: str) -> tuple[Tensor, Tensor]:
        """Return the flow-matching errors (b,) of the winners and of the losers."""
        velocity = policy.velocity(x, sigma, batch.cond, batch.guidance_scale, weights=weights)
        return flow_matching_error(velocity, batch.kept["final"], noise).chunk(2)
