"""Flow-GRPO: clipped policy gradient on the steps of an SDE, with a KL to the reference.

Source: Liu et al., arXiv 2505.05470; windows as in Flow-GRPO-Fast and MixGRPO (2507.21802).
"""

from typing import final

import torch
from torch import Tensor

from flow_grpo import sde
from flow_grpo.advantages import group_advantages
from flow_grpo.algorithms.base import RowBatch, Rows, Scores, all_pairs
from flow_grpo.losses import clipped_surrogate, velocity_kl

KL_SCALES = ("true", "reference")


@final
class Grpo:
    """Group-relative advantages, PPO's clipped ratio per denoising step."""

    def __init__(self, config):
        """Read `sample.{sde_type, noise_level, global_std}` and `train.{clip_range, ...}`."""
        if config.train.kl_scale not in KL_SCALES:
            raise ValueError(
                f"train.kl_scale ({config.train.kl_scale!r}) must be one of {', '.join(KL_SCALES)}"
            )
        self.sde = sde.SDES[config.sample.sde_type]
        self.noise_level = config.sample.noise_level
        self.guidance_scale = config.sample.guidance_scale
        self.global_std = config.sample.global_std
        self.clip_range = config.train.clip_range
        self.adv_clip_max = config.train.adv_clip_max
        self.kl_coef = config.train.kl_coef
        self.kl_scale = config.train.kl_scale
        extra = {"reference_velocity"} if self.kl_coef > 0 else set()
        self.keeps = frozenset({"window"} | extra)

    def advantages(self, scores: Scores) -> Tensor:
        """Centre by group, scale by the group's or the global std, clip: (n,) float64."""
        return group_advantages(
            scores.total,
            scores.group_ids,
            valid=scores.valid,
            global_std=self.global_std,
            clip=self.adv_clip_max,
        )

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps: int, generator) -> Rows:
        """Return all steps of the valid samples; those of zero advantage only under a KL."""
        kept = scores.valid if self.kl_coef > 0 else scores.valid & (advantages != 0)
        return all_pairs(kept.nonzero().flatten(), num_steps)

    def loss(self, policy, rows: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the clipped surrogate + kl_coef * KL, and metrics."""
        velocity = policy.velocity(rows.x, rows.sigma, rows.cond, self.guidance_scale)
        transition = self._transition(rows, velocity)
        log_prob = sde.log_prob(transition, rows.x_next, normalised=self.sde.normalised)
        loss, ratio = clipped_surrogate(
            log_prob, rows.old_log_prob, rows.advantage, clip_range=self.clip_range
        )
        metrics = {
            "policy_loss": loss.detach(),
            "ratio": ratio.detach(),
            "clip_fraction": ((ratio.detach() - 1).abs() > self.clip_range).float(),
            "approx_kl": 0.5 * (log_prob - rows.old_log_prob).detach().square(),
        }
        if self.kl_coef > 0:
            kl = self._kl(rows, velocity, transition)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        metrics["loss"] = loss.detach()
        return (loss * rows.weight).sum(), metrics

    def _transition(self, rows: RowBatch, velocity: Tensor) -> sde.Transition:
        return self.sde.step(
            rows.x,
            velocity,
            rows.sigma,
            rows.sigma_next,
            noise_level=self.noise_level,
            sigma_max=rows.sigma_max,
        )

    def _kl(self, rows: RowBatch, velocity: Tensor, transition: sde.Transition) -> Tensor:
        """Return the Gaussian KL (b,); the velocity KL for steps without a true density."""
        if not self.sde.normalised:
            return velocity_kl(velocity, rows.reference_velocity)
        with torch.no_grad():
            reference = self._transition(rows, rows.reference_velocity)
        scale = rows.sigma - rows.sigma_next if self.kl_scale == "reference" else 1.0
        return sde.kl(transition, reference.mean, scale=scale)
