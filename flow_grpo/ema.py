"""Keep an exponential moving average of the trained tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Ema:
    """Average of a list of tensors, one update per optimizer step.

    The decay of update u (from 0) is min((1 + u) / (10 + u), decay), as in the reference, so that
    the first average is not the untrained weights.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float):
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"ema_decay ({decay}) must be in [0, 1); the published rate is 0.987")
        self.decay = decay
        self.tensors = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def update(self, tensors: Sequence[Tensor], update: int) -> None:
        """Take in the weights after optimizer step number `update` (from 0)."""
        decay = min((1 + update) / (10 + update), self.decay)
        torch._foreach_lerp_(self.tensors, [t.detach() for t in tensors], 1.0 - decay)
