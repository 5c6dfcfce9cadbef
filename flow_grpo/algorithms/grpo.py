"""Flow-GRPO: clipped policy gradient on the steps of an SDE, with a KL to the reference.

Source: Liu et al., arXiv 2505.05470; windows as in Flow-GRPO-Fast and MixGRPO (2507.21802).
"""

from typing import final

import torch
from torch import Tensor

from flow_grpo import sde
from flow_grpo.algorithms._advantage_types import Advantages
from flow_grpo.algorithms.base import RowBatch, Rows, Scores, all_steps, trainable
from flow_grpo.losses import clipped_surrogate, velocity_kl

KL_TYPES = ("auto", "gaussian", "velocity", "velocity_std")
KL_SCALES = ("true", "reference")


@final
class Grpo:
    """Group-relative advantages, PPO's clipped ratio per denoising step."""

    rollout_weights = "current"

    def __init__(self, config):
        """Read `sample.{sde_type, noise_level, guidance_scale}`, `train.{clip_*, kl_*, adv_*}`."""
        self.sde_type = config.sample.sde_type
        self.sde = sde.SDES[self.sde_type]
        self.noise_level = config.sample.noise_level
        self.guidance_scale = config.sample.guidance_scale
        low = config.train.clip_range
        self.clip_range = (low, config.train.clip_range_high or low)
        self.advantages = Advantages(config)
        self.kl_coef = config.train.kl_coef
        self.kl_type = self.kl_scale = ""
        if self.kl_coef > 0:
            self._read_kl(config)
        needs = {"reference_velocity"} if self.kl_coef > 0 else set()
        self.keeps = frozenset({"window"} | needs)
        self.weights = frozenset({"reference"} if self.kl_coef > 0 else ())

    def _read_kl(self, config) -> None:
        """Read which KL; `auto` is the Gaussian one, for steps without a density the velocities'.

        Raises:
            ValueError: an unknown type or scale.
        """
        self.kl_type = config.train.kl_type
        if self.kl_type not in KL_TYPES:
            raise ValueError(
                f"train.kl_type ({self.kl_type!r}) must be one of {', '.join(KL_TYPES)}"
            )
        if self.kl_type == "auto":
            self.kl_type = "gaussian" if self.sde.normalised else "velocity"
        if self.kl_type == "gaussian":
            self.kl_scale = config.train.kl_scale
            if self.kl_scale not in KL_SCALES:
                raise ValueError(
                    f"train.kl_scale ({self.kl_scale!r}) must be one of {', '.join(KL_SCALES)}"
                )
            if self.kl_scale == "reference" and self.sde_type != "flow_sde":
                raise ValueError(
                    f"train.kl_scale ('reference') has the value that the reference code gives "
                    f"flow_sde; with sample.sde_type {self.sde_type!r} its KL is the true one: set "
                    "train.kl_scale to 'true'"
                )

    def old_decay(self, before: int, after: int) -> float:
        """Return 0; there are no old weights."""
        return 0.0

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps, sigmas, generator) -> Rows:
        """Return all steps of the valid samples; those of zero advantage only under a KL."""
        return all_steps(trainable(advantages, self.kl_coef).nonzero().flatten(), num_steps)

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the clipped surrogate + kl_coef * KL, and metrics."""
        velocity, transition = self.step(policy, batch)
        log_prob = sde.log_prob(
            transition, batch.kept["next_latents"], normalised=self.sde.normalised
        )
        return self.objective(batch, velocity, transition, log_prob - batch.kept["log_probs"])

    def step(self, policy, batch: RowBatch) -> tuple[Tensor, sde.Transition]:
        """Return the policy's velocity and step at the rows' states."""
        x = batch.kept["latents"]
        velocity = policy.velocity(x, batch.sigma, batch.cond, self.guidance_scale)
        return velocity, self._transition(batch, velocity)

    def objective(
        self,
        batch: RowBatch,
        velocity: Tensor,
        transition: sde.Transition,
        log_ratio: Tensor,
        scale: float | Tensor = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of scale * surrogate + kl_coef * KL, and metrics per row.

        Args:
            batch: of b rows.
            velocity: (b, *latent), the policy's.
            transition: the policy's.
            log_ratio: (b,).
            scale: of the surrogate, a number or (b,).
        """
        surrogate = clipped_surrogate(log_ratio, batch.advantage, clip_range=self.clip_range)
        loss = surrogate.loss * scale
        ratio = surrogate.ratio.detach()
        low, high = self.clip_range
        metrics = {
            "policy_loss": loss.detach(),
            "ratio": ratio,
            "log_ratio": log_ratio.detach(),
            "clipped": surrogate.clipped.float(),
            "clip_fraction": ((ratio < 1 - low) | (ratio > 1 + high)).float(),
            "approx_kl": 0.5 * log_ratio.detach().square(),
        }
        if self.kl_coef > 0:
            kl = self._kl(batch, velocity, transition)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        metrics["loss"] = loss.detach()
        return (loss * batch.weight).sum(), metrics

    def _transition(self, batch: RowBatch, velocity: Tensor) -> sde.Transition:
        return self.sde.step(
            batch.kept["latents"],
            velocity,
            batch.sigma,
            batch.sigma_next,
            noise_level=self.noise_level,
            sigma_max=batch.sigma_max,
        )

    def _kl(self, batch: RowBatch, velocity: Tensor, transition: sde.Transition) -> Tensor:
        """Return the KL to the reference (b,)."""
        reference_velocity = batch.kept["reference_velocity"]
        if self.kl_type == "velocity":
            return velocity_kl(velocity, reference_velocity)
        if self.kl_type == "velocity_std":
            return velocity_kl(velocity, reference_velocity, std=self._published_std(batch))
        with torch.no_grad():
            reference = self._transition(batch, reference_velocity)
        scale = batch.sigma - batch.sigma_next if self.kl_scale == "reference" else 1.0
        return sde.kl(transition, reference.mean, scale=scale)

    def _published_std(self, batch: RowBatch) -> Tensor:
        """Return the std by which DeepGen-RL's code weighs: Flow-SDE's lacks sqrt(dt)."""
        std = self._transition(batch, torch.zeros_like(batch.kept["latents"])).std
        if self.sde_type != "flow_sde":
            return std
        dt = (batch.sigma - batch.sigma_next).reshape(std.shape)
        return std / dt.sqrt()
