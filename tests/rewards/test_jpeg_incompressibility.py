"""The score is the file size of a JPEG in 1000 bytes."""

import torch

from flow_grpo.rewards.base import Samples
from flow_grpo.rewards.jpeg_compressibility import JpegCompressibility
from flow_grpo.rewards.jpeg_incompressibility import JpegIncompressibility


def test_it_is_compressibility_times_minus_500():
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images[0] = 0.5
    samples = Samples(images, ["a"] * 3, [{}] * 3)
    sizes = JpegIncompressibility()(samples).values
    torch.testing.assert_close(sizes, JpegCompressibility()(samples).values * -500)
    assert 0 < sizes[0] < sizes[1]
