"""The clip's OCR reward is the mean of the image's over the frames that show some of the text."""

import pytest
import torch

from flow_grpo.rewards import video_ocr
from flow_grpo.rewards.base import Samples, State
from flow_grpo.rewards.ocr import Ocr
from flow_grpo.rewards.video_ocr import VideoOcr

PROMPT = 'a sign that says "STOP"'


@pytest.fixture
def reward(monkeypatch):
    """Return the reward with an engine that reads what a frame's first pixel stands for."""
    texts = ["", "STOP", "STOX", "nonsense", "-- stop --"]
    monkeypatch.setattr(Ocr, "__init__", lambda self, device: None)
    monkeypatch.setattr(Ocr, "read", lambda self, pixels: texts[pixels[0, 0, 0]])
    return VideoOcr()


def score(reward, frames: list[int], prompt: str = PROMPT):
    clip = torch.tensor(frames).view(-1, 1, 1, 1).expand(-1, 3, 4, 4) / 255
    scores = reward(Samples(clip[None], [prompt], [{}]))
    details = scores.details.get("frames", torch.tensor([torch.nan]))
    return scores.values.item(), details.item(), scores.states.item()


def test_every_fourth_frame_counts_and_those_without_text_do_not(reward):
    # Frames 0, 4, 8 read "STOP", "" and "STOX": (1 + 0.75) / 2, of 2 in 3 frames.
    value, share, _ = score(reward, [1, 3, 3, 3, 0, 3, 3, 3, 2])
    assert value == pytest.approx(0.875)
    assert share == pytest.approx(2 / 3)


def test_a_frame_that_contains_the_text_is_right(reward):
    assert score(reward, [4])[0] == 1


def test_a_clip_without_the_text_scores_nothing(reward):
    assert score(reward, [0, 1, 1, 1, 0]) == (0.0, 0.0, State.OK)


def test_an_image_is_a_clip_of_one_frame(reward):
    image = torch.full((1, 3, 4, 4), 2 / 255)
    assert reward(Samples(image, [PROMPT], [{}])).values.item() == 0.75


def test_a_prompt_without_quotes_is_not_applicable(reward):
    assert score(reward, [1], "a stop sign")[2] == State.NOT_APPLICABLE
    assert VideoOcr.check_prompts([PROMPT, "a stop sign"]) == [True, False]


def test_real_frames_score_as_their_images_do():
    from test_ocr import sign

    real = VideoOcr()
    blank = torch.zeros(3, 64, 64)
    clip = torch.stack([sign("STOP"), *[blank] * 3, blank, *[blank] * 3, sign("STOP")])
    scores = real(Samples(clip[None], [PROMPT], [{}]))
    assert scores.values.item() == 1
    assert scores.details["frames"].item() == pytest.approx(2 / 3)
    assert video_ocr.STRIDE == 4
