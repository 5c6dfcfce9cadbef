"""Read how advantages are estimated, for the algorithms that use them."""

import logging

import torch
from torch import Tensor

from flow_grpo.advantages import (
    gdpo_advantages,
    group_advantages,
    reinforce_advantages,
    zero_variance_rewards,
)
from flow_grpo.algorithms.base import Scores

logger = logging.getLogger(__name__)

TYPES = ("grpo", "gdpo", "reinforce_pp")


class Advantages:
    """Turn scores into advantages as `train.adv_type` says: (n,) float64, NaN where invalid."""

    def __init__(self, config):
        """Read `train.{adv_type, adv_clip_max}` and, for grpo, `sample.global_std`."""
        self._type = config.train.adv_type
        if self._type not in TYPES:
            raise ValueError(f"train.adv_type ({self._type!r}) must be one of {', '.join(TYPES)}")
        self._clip = config.train.adv_clip_max
        self._global_std = config.sample.global_std if self._type == "grpo" else False
        self._warned = False

    def __call__(self, scores: Scores) -> Tensor:
        if self._type == "gdpo":
            self._warn(scores)
            advantages, valid = gdpo_advantages(
                scores.values, scores.weights, scores.states, scores.group_ids, clip=self._clip
            )
        elif self._type == "grpo":
            valid = scores.valid
            advantages = group_advantages(
                scores.total,
                scores.group_ids,
                valid=valid,
                global_std=self._global_std,
                clip=self._clip,
            )
        else:
            valid = scores.valid
            advantages = reinforce_advantages(scores.total, valid=valid, clip=self._clip)
        return torch.where(valid, advantages, torch.nan)

    def _warn(self, scores: Scores) -> None:
        """Say once that a reward tells no two images of any group apart."""
        same = zero_variance_rewards(scores.values, scores.weights, scores.states, scores.group_ids)
        if same and not self._warned:
            self._warned = True
            logger.warning(
                "reward %s scores all images of every prompt the same in this epoch: GDPO learns "
                "nothing from it (said once)",
                ", ".join(same),
            )
