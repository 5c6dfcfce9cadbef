"""Reward images that are what the prompt's sign looks like, pixel by pixel."""

import numpy as np
from torch import Tensor

from flow_grpo.rewards.base import Samples, Scores, score_each
from gold.signs import SIZE, applies, renderings, word_and_color


class SignDistance:
    """Score minus the distance to the nearest true rendering, RMS over pixels, in [-1, 0]."""

    scope = "sample"
    runs = "thread"

    def __init__(self, device: str = "cpu"):
        self.device = "cpu"

    @staticmethod
    def check_prompts(prompts: list[str]) -> list[bool]:
        """Say for each prompt whether it follows the template."""
        return [applies(prompt) for prompt in prompts]

    def __call__(self, samples: Samples) -> Scores:
        return score_each(samples, self._score)

    def _score(self, image: Tensor, prompt: str, _metadata: dict) -> tuple[float, dict]:
        true = renderings(*word_and_color(prompt))
        if image.shape != (3, SIZE, SIZE):
            raise ValueError(f"image of shape {tuple(image.shape)}, but signs are {SIZE} x {SIZE}")
        squares = np.square(true - image.numpy()).mean((1, 2, 3))
        return -float(np.sqrt(squares.min())), {}
