"""GRPO-Guard: a ratio that is normalised per step, and equal gradients over the steps.

The log-ratio is mean(noise * (mean - old mean)): centred at 0 under the collecting policy and of
one scale whatever the step's std. The surrogate is divided by the size of d mean / d velocity (up
to Flow-SDE's 1 + a^2 / 2, as published: by dt), so that no step outweighs the others.
Source: Wang et al., arXiv 2510.22319; the published code's bias is a mean over the batch, here it
is exact and per sample.
"""

from typing import final

from torch import Tensor

from flow_grpo import sde
from flow_grpo.algorithms.base import RowBatch, Rows, Scores
from flow_grpo.algorithms.grpo import Grpo
from flow_grpo.losses import guard_log_ratio


@final
class GrpoGuard:
    """GRPO with RatioNorm and the reweighting of steps."""

    rollout_weights = "current"

    def __init__(self, config):
        """Read what `Grpo` reads."""
        self._grpo = Grpo(config)
        self.advantages = self._grpo.advantages
        self.weights = self._grpo.weights
        self.keeps = self._grpo.keeps | {"old_mean"}

    def old_decay(self, before: int, after: int) -> float:
        """Return 0; there are no old weights."""
        return 0.0

    def rows(self, advantages: Tensor, scores: Scores, **settings) -> Rows:
        """Return GRPO's rows."""
        return self._grpo.rows(advantages, scores, **settings)

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the guarded surrogate + kl_coef * KL, and metrics."""
        velocity, transition = self._grpo.step(policy, batch)
        old_mean = batch.kept["old_means"]
        noise = (batch.kept["next_latents"].float() - old_mean) / transition.std
        log_ratio = guard_log_ratio(noise, transition.mean, old_mean)
        return self._grpo.objective(
            batch, velocity, transition, log_ratio, 1 / self._step_size(batch)
        )

    def _step_size(self, batch: RowBatch) -> Tensor:
        """Return (b,): dt for Flow-SDE and Dance-SDE, |d mean / d velocity| for CPS."""
        if self._grpo.sde_type != "cps":
            return batch.sigma - batch.sigma_next
        return sde.velocity_slope(
            "cps", batch.sigma, batch.sigma_next, noise_level=self._grpo.noise_level
        )
