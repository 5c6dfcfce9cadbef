"""The contract of a reward: what it is given, what it returns, how an item may fail."""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class State(IntEnum):
    """What became of one sample's score."""

    OK = 0
    NOT_APPLICABLE = 1  # the reward has nothing to say here: adds nothing, is no failure
    FAILED = 2  # the sample is dropped


class Samples(NamedTuple):
    """What a reward is given."""

    images: Tensor  # (n, 3, h, w), or clips (n, f, 3, h, w), float32 on the CPU, in [0, 1]
    prompts: list[str]
    metadata: list[dict]
    # of editing runs: n tuples of images (3, h, w) like `images`, each as large as its file
    reference_images: list[tuple[Tensor, ...]] | None = None
    group_ids: Tensor | None = None  # (n,) int64


class Scores(NamedTuple):
    """What a reward returns."""

    values: Tensor  # (n,) float32, NaN where the state is not OK
    states: Tensor  # (n,) uint8, of State
    reasons: list[str]  # "" where the state is OK
    details: dict[
        str, Tensor
    ]  # name -> (n,) float32, for whoever inspects the scores; never trained on


class Reward(Protocol):
    """A reward: a class named after its file, built with a device, called with samples.

    An optional `check_prompts(prompts) -> list[bool]` (static) says to which prompts it applies, an
    optional `media`, ("image",) by default, which of "image" and "video" it scores, an optional
    `needs_reference`, False by default, that it compares with the image that was edited.
    """

    scope: str  # "sample": each item by itself | "group": needs whole groups in one call
    runs: str  # "inline": in the caller | "thread" | "process"
    device: str

    def __call__(self, samples: Samples) -> Scores: ...


class NotApplicable(Exception):
    """Raised by a scorer of one sample: the reward does not apply to it; the text is the reason."""


def score_each(samples: Samples, score: Callable[[Tensor, str, dict], tuple]) -> Scores:
    """Score samples one by one; a sample that raises fails alone, with the exception as reason.

    `score(image (3, h, w) or clip, prompt, metadata)` returns (value, {detail name: number}).
    """
    num = len(samples.prompts)
    values = torch.full((num,), torch.nan)
    states = torch.full((num,), State.FAILED, dtype=torch.uint8)
    reasons, details = [""] * num, {}
    for i, row in enumerate(zip(samples.images, samples.prompts, samples.metadata, strict=True)):
        try:
            values[i], numbers = score(*row)
            states[i] = State.OK
        except NotApplicable as reason:
            states[i], reasons[i] = State.NOT_APPLICABLE, str(reason)
            continue
        except Exception as error:  # whatever one image does to a scorer stays with that image
            reasons[i] = f"{type(error).__name__}: {error}"
            continue
        for key, number in numbers.items():
            details.setdefault(key, torch.full((num,), torch.nan))[i] = number
    return Scores(values, states, reasons, details)


def score_edits(samples: Samples, score: Callable[[Tensor, tuple, str, dict], tuple]) -> Scores:
    """Score edited images one by one, as `score_each`; one without a reference: not applicable.

    `score(image (3, h, w), its reference images, prompt, metadata)` returns as in `score_each`.
    """
    references = iter(samples.reference_images or [()] * len(samples.prompts))

    def edited(image: Tensor, prompt: str, metadata: dict) -> tuple:
        own = next(references)
        if not own:
            raise NotApplicable("there is no reference image to compare with")
        return score(image, own, prompt, metadata)

    return score_each(samples, edited)


def failed(num: int, reason: str) -> Scores:
    """Return scores of which every item has failed for one reason."""
    values = torch.full((num,), torch.nan)
    states = torch.full((num,), State.FAILED, dtype=torch.uint8)
    return Scores(values, states, [reason] * num, {})


def checked(scores: Scores, num: int) -> Scores:
    """Return well-formed scores of `num` samples: a value that is not finite is a failed item.

    Whatever a reward gets wrong (type, length) fails all items and says what came.
    """
    if not isinstance(scores, Scores):
        return failed(num, f"returned {type(scores).__name__}, but a reward returns Scores")
    values = torch.as_tensor(scores.values).detach().to("cpu", torch.float32, copy=True)
    states = torch.as_tensor(scores.states).detach().to("cpu", torch.uint8, copy=True)
    details = {k: torch.as_tensor(v).detach().cpu().float() for k, v in scores.details.items()}
    columns = {"values": values, "states": states, **details}
    lengths = {key: tuple(column.shape) for key, column in columns.items()}
    lengths["reasons"] = (len(scores.reasons),)
    for key, shape in lengths.items():
        if shape != (num,):
            return failed(num, f"returned {key} of shape {shape} for {num} samples")
    reasons = list(scores.reasons)
    for i in (~torch.isfinite(values) & (states == State.OK)).nonzero().flatten().tolist():
        reasons[i] = f"returned {values[i].item()}"
        states[i] = State.FAILED
    values[states != State.OK] = torch.nan
    return Scores(values, states, reasons, details)


def to_uint8(image: Tensor) -> np.ndarray:
    """Convert an image (3, h, w) in [0, 1] to (h, w, 3) uint8 RGB; ValueError if it is broken."""
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"broken image: shape {tuple(image.shape)}, but (3, h, w) is needed")
    if not bool(torch.isfinite(image).all()):
        raise ValueError("broken image: it holds values that are not finite")
    pixels = (image.float() * 255).round().clamp(0, 255).to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def reference_image(reference: Tensor, image: Tensor) -> np.ndarray:
    """Return a reference (3, h', w') as (h, w, 3) uint8, resized (bicubic) to the image's size.

    Its shape may change: a family that edits makes images of one size from references of any.
    Raises ValueError if it is broken, as `to_uint8`.
    """
    from PIL import Image

    pixels = Image.fromarray(to_uint8(reference))
    height, width = image.shape[-2:]
    return np.asarray(pixels.resize((width, height), Image.Resampling.BICUBIC))
