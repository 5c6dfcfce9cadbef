"""Reward-weighted regression: flow matching on a group's images, weighted by their rewards.

The weights are the softmax of the rewards within the group, as in the Flow-RWR baseline of Liu et
al., arXiv 2505.05470, scaled to a mean of 1.
"""

import math
from functools import partial
from typing import final

from torch import Tensor

from flow_grpo.advantages import group_softmax
from flow_grpo.algorithms.base import RowBatch, Rows, Scores
from flow_grpo.algorithms.sft import Sft


@final
class Rwr:
    """SFT with soft weights."""

    rollout_weights = "old"
    keeps = Sft.keeps

    def __init__(self, config):
        """Read what `Sft` reads, and `train.rwr_temperature`.

        Raises:
            ValueError: the temperature is not above 0.
        """
        temperature = config.train.rwr_temperature
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"train.rwr_temperature ({temperature}) must be finite and above 0, such as 1.0"
            )
        self._sft = Sft(config, weigh=partial(group_softmax, temperature=temperature))
        self.weights = self._sft.weights
        self.old_decay = self._sft.old_decay
        self.advantages = self._sft.advantages

    def rows(self, advantages: Tensor, scores: Scores, **settings) -> Rows:
        """Return SFT's rows."""
        return self._sft.rows(advantages, scores, **settings)

    def loss(self, policy, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return SFT's loss."""
        return self._sft.loss(policy, batch)
