"""The similarity of pixels is 1 - their mean absolute difference."""

import pytest
import torch

from flow_grpo.rewards.base import Samples, State
from flow_grpo.rewards.pixel_similarity import PixelSimilarity


def score(images: torch.Tensor, references):
    num = len(images)
    return PixelSimilarity("cuda:0")(Samples(images, [""] * num, [{}] * num, references))


def test_it_is_one_minus_the_mean_difference():
    images = torch.full((4, 3, 8, 8), 0.4)
    images[1, 0] = 1.0  # one of three colours: (0.6 - 0) / 3 more
    references = [(torch.full((3, 8, 8), 0.2),)] * 2 + [(images[2],), (torch.ones(3, 8, 8),)]
    values = score(images, references).values
    # 1 - 0.2; 1 - (0.2 * 2 + 0.8) / 3; the same picture; 1 - 0.6. All are steps of 1/255.
    torch.testing.assert_close(values, torch.tensor([0.8, 0.6, 1.0, 0.4]), rtol=0, atol=1e-6)


def test_black_and_white_are_the_ends_of_the_scale():
    assert score(torch.zeros(1, 3, 4, 4), [(torch.ones(3, 9, 9),)]).values.item() == 0.0


def test_a_reference_of_another_size_is_resized_and_the_first_counts():
    halves = torch.zeros(3, 40, 100)
    halves[:, :, 50:] = 1.0
    image = torch.zeros(1, 3, 10, 10)
    image[:, :, :, 5:] = 1.0
    scores = score(image, [(halves, torch.zeros(3, 10, 10))])
    assert scores.values.item() == pytest.approx(1, abs=0.05)  # bicubic blurs the edge
    assert score(image.flip(-1), [(halves,)]).values.item() == pytest.approx(0, abs=0.05)
    assert score(image.transpose(2, 3), [(halves,)]).values.item() == pytest.approx(0.5, abs=0.05)


def test_a_broken_reference_fails_its_own_sample():
    broken = torch.full((3, 4, 4), torch.nan)
    scores = score(torch.zeros(2, 3, 4, 4), [(broken,), (torch.zeros(3, 4, 4),)])
    assert scores.states.tolist() == [State.FAILED, State.OK]
    assert "not finite" in scores.reasons[0]
