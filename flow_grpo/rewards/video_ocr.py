"""Reward clips whose frames show the text which their prompt quotes, read by RapidOCR."""

from torch import Tensor

from flow_grpo.rewards.base import NotApplicable, Samples, Scores, score_each, to_uint8
from flow_grpo.rewards.ocr import Ocr, normalised, quoted_segments, targets, text_distance

STRIDE = 4  # every fourth frame is read: the frames of one latent look alike


class VideoOcr:
    """Score the mean of `ocr`'s formula over every fourth frame, those of score 0 left out.

    0 if all of them score 0. Source: the reference's video_ocr; it has no rule for text that
    contains what is quoted, `ocr` has, so that one frame scores what an image of it would.
    Detail `frames`: the share of the frames read that score above 0.
    """

    scope = "sample"
    runs = "thread"
    media = ("image", "video")

    def __init__(self, device: str = "cpu"):
        self.device = "cpu"  # wherever the model is
        self._ocr = Ocr(device)

    @staticmethod
    def check_prompts(prompts: list[str]) -> list[bool]:
        """Say for each prompt whether it quotes some text."""
        return Ocr.check_prompts(prompts)

    def __call__(self, samples: Samples) -> Scores:
        return score_each(samples, self._score)

    def _score(self, clip: Tensor, prompt: str, _metadata: dict) -> tuple[float, dict]:
        frames = clip if clip.ndim == 4 else clip[None]  # an image is a clip of one frame
        segments = quoted_segments(prompt)
        wanted = targets(segments)
        if not wanted:
            raise NotApplicable("the prompt quotes no text to look for")
        length, scores = sum(map(len, wanted)), []
        for frame in frames[::STRIDE]:
            text = normalised(self._ocr.read(to_uint8(frame)), "".join(segments))
            scores.append(1 - text_distance(text, wanted) / length)
        seen = [score for score in scores if score > 0]
        mean = sum(seen) / len(seen) if seen else 0.0
        return mean, {"frames": len(seen) / len(scores)}
