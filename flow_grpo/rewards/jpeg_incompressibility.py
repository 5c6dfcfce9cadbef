"""Reward images that JPEG compresses badly."""

from flow_grpo.rewards.base import Samples, Scores, score_each
from flow_grpo.rewards.jpeg_compressibility import jpeg_kilobytes


class JpegIncompressibility:
    """Score the size as JPEG of quality 95, in 1000 bytes."""

    scope = "sample"
    runs = "thread"

    def __init__(self, device: str = "cpu"):
        self.device = device

    def __call__(self, samples: Samples) -> Scores:
        return score_each(samples, lambda image, *_: (jpeg_kilobytes(image), {}))
