"""Reward edited images whose pixels are near those of the image they were made from."""

import numpy as np
from torch import Tensor

from flow_grpo.rewards.base import Samples, Scores, reference_image, score_edits, to_uint8


class PixelSimilarity:
    """Score 1 - the mean absolute difference of the pixels, in [0, 1], to the first reference.

    The reference is resized to the image's size first. It needs no model: an edit's other reward
    says what must change, this one that the rest should stay. By itself it teaches copying.
    """

    scope = "sample"
    runs = "thread"
    needs_reference = True

    def __init__(self, device: str = "cpu"):
        self.device = "cpu"  # wherever the model is

    def __call__(self, samples: Samples) -> Scores:
        return score_edits(samples, _score)


def _score(image: Tensor, references, _prompt: str, _metadata: dict) -> tuple[float, dict]:
    made = to_uint8(image).astype(np.int16)
    return 1 - float(np.abs(made - reference_image(references[0], image)).mean()) / 255, {}
