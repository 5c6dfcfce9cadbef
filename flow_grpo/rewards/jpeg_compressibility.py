"""Reward images that JPEG compresses well."""

import io

from PIL import Image
from torch import Tensor

from flow_grpo.rewards.base import Samples, Scores, score_each, to_uint8

QUALITY = 95


def jpeg_kilobytes(image: Tensor) -> float:
    """Return the size of an image (3, h, w) in [0, 1] as JPEG of quality 95, in 1000 bytes."""
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(image)).save(buffer, format="JPEG", quality=QUALITY)
    return len(buffer.getvalue()) / 1000


class JpegCompressibility:
    """Score -kilobytes / 500, the scale of the reference implementation; always below 0."""

    scope = "sample"
    runs = "thread"

    def __init__(self, device: str = "cpu"):
        self.device = device

    def __call__(self, samples: Samples) -> Scores:
        return score_each(samples, lambda image, *_: (-jpeg_kilobytes(image) / 500, {}))
