"""The score is the file size of a JPEG, on the reference's scale."""

import numpy as np
import pytest
import torch
from PIL import Image

from flow_grpo.rewards.base import Samples
from flow_grpo.rewards.jpeg_compressibility import JpegCompressibility


def images():
    """Return a flat image and one of noise, (2, 3, 32, 48)."""
    noise = torch.rand(3, 32, 48, generator=torch.Generator().manual_seed(0))
    return torch.stack([torch.full((3, 32, 48), 0.5), noise])


def test_the_score_is_minus_the_file_size_in_kilobytes_over_500(tmp_path):
    scores = JpegCompressibility()(Samples(images(), ["a", "b"], [{}, {}]))
    for image, score in zip(images(), scores.values, strict=True):
        pixels = np.uint8(np.moveaxis(image.numpy(), 0, 2) * 255 + 0.5)
        path = tmp_path / "image.jpg"
        Image.fromarray(pixels).save(path, quality=95)
        assert score.item() == pytest.approx(-path.stat().st_size / 1000 / 500)


def test_flat_images_score_higher_than_noise():
    flat, noise = JpegCompressibility()(Samples(images(), ["a", "b"], [{}, {}])).values.tolist()
    assert noise < flat < 0
