"""Reward images whose sign has the prompt's colour."""

import numpy as np
from torch import Tensor

from flow_grpo.rewards.base import Samples, Scores, score_each
from gold.signs import TEXT_ROWS, applies, word_and_color, words


class Background:
    """Score minus the distance of the background's median colour to the prompt's, in [-1, 0].

    The background is all rows above and below the text. RMS over the three channels.
    """

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
        _, color = word_and_color(prompt)
        outside = np.delete(image.numpy(), TEXT_ROWS, axis=1).reshape(3, -1)
        off = np.median(outside, axis=1) - np.array(words.COLORS[color]) / 255
        return -float(np.sqrt(np.square(off).mean())), {}
