"""DiffusionNFT: move towards good images and away from bad ones on the forward process.

The clean images that the collecting ("old") weights made are noised again; the trained velocity
defines one policy that moves from the old one and one that moves as far the other way, each
matched with the image in proportion to how good it was. No log-probability, any sampler.
Source: Zheng et al., arXiv 2509.16117 (clean-latent form; DeepGen-RL's code takes the next step's
latent for the image).
"""

import math
from typing import final

from torch import Tensor

from flow_grpo.algorithms._advantage_types import Advantages
from flow_grpo.algorithms.base import RowBatch, Rows, Scores, noise_levels, trainable
from flow_grpo.losses import nft_loss, velocity_kl
from flow_grpo.sde import diffuse


@final
class Nft:
    """Negative-aware fine-tuning with an averaged collecting policy."""

    rollout_weights = "old"
    keeps = frozenset({"final"})

    def __init__(self, config):
        """Read `train.{nft_*, adv_*, kl_coef, draws_per_sample}` and `sample.global_std`.

        Raises:
            ValueError: nft_beta is not above 0, or the decay is outside [0, 1].
        """
        self.beta = config.train.nft_beta
        self.decay, self.ramp = config.train.nft_old_decay, config.train.nft_old_ramp
        if not self.beta > 0:
            raise ValueError(f"train.nft_beta ({self.beta}) must be above 0, such as 1.0 or 0.1")
        if not (0 <= self.decay <= 1 and 0 <= self.ramp < math.inf):
            raise ValueError(
                f"train.nft_old_decay ({self.decay}) must be in [0, 1] and train.nft_old_ramp "
                f"({self.ramp}) at least 0; published are 0.5 and 0.001"
            )
        self.advantages = Advantages(config)
        self.adv_clip_max = config.train.adv_clip_max
        self.kl_coef = config.train.kl_coef
        self.draws = config.train.draws_per_sample
        self.weights = frozenset({"old", "reference"} if self.kl_coef > 0 else {"old"})

    def old_decay(self, before: int, after: int) -> float:
        """Average the collecting weights after every epoch, slowly only later in the run."""
        return min(self.ramp * after, self.decay)

    def rows(self, advantages: Tensor, scores: Scores, *, num_steps, sigmas, generator) -> Rows:
        """Return the valid samples, `draws` times; those of zero advantage only under a KL."""
        return noise_levels(
            trainable(advantages, self.kl_coef).nonzero(),
            draws=self.draws,
            sigmas=sigmas,
            generator=generator,
            logit_normal=False,
        )

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of adv_clip_max * NFT + kl_coef * KL, and metrics."""
        x_0, sigma, cond = batch.kept["final"], batch.sigma, batch.cond
        scale = batch.guidance_scale
        x = diffuse(x_0, batch.noise, sigma)
        old = policy.velocity(x, sigma, cond, scale, weights="old")
        if self.kl_coef > 0:
            reference = policy.velocity(x, sigma, cond, scale, weights="reference")
        velocity = policy.velocity(x, sigma, cond, scale)
        preference = (batch.advantage / self.adv_clip_max).clamp(-1, 1) / 2 + 0.5
        loss = nft_loss(velocity, old, x, x_0, sigma, preference, beta=self.beta)
        loss = loss * self.adv_clip_max
        metrics = {
            "policy_loss": loss.detach(),
            "old_distance": velocity_kl(velocity.detach(), old),
        }
        if self.kl_coef > 0:
            kl = velocity_kl(velocity, reference)
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        metrics["loss"] = loss.detach()
        return (loss * batch.weight).sum(), metrics
