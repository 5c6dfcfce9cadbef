"""Read reference images from disk, and tell them apart by content."""

import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

UNREADABLE = ("stop", "skip")
Prompt = TypeVar("Prompt")  # has `.image`, a path or None


def open_image(path: Path):
    """Return an image file as a PIL image, RGB, decoded.

    Raises:
        ValueError: there is no such file, or it holds no whole image.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if not path.is_file():
            raise ValueError(f"reference image {path} does not exist") from error
        raise ValueError(f"reference image {path} cannot be read: {error}") from error


def image_tensor(path: Path) -> Tensor:
    """Return an image file as (3, h, w) float32 in [0, 1]."""
    pixels = torch.from_numpy(np.array(open_image(path)))
    return pixels.permute(2, 0, 1).float() / 255


@functools.cache
def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file, read once a process.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"reference image {path} cannot be read: {error}") from error


def with_readable_images(prompts: Sequence[Prompt], unreadable: str) -> list[Prompt]:
    """Return the prompts whose reference image, if they have one, can be decoded.

    Args:
        prompts: in order.
        unreadable: "stop" raises at the first image that cannot be, "skip" names it in the log.

    Raises:
        ValueError: such an image, none left, or an unknown `unreadable`.
    """
    if unreadable not in UNREADABLE:
        raise ValueError(
            f"unreadable_images ({unreadable!r}) must be one of {', '.join(UNREADABLE)}"
        )
    problems: dict[Path, str] = {}
    for path in dict.fromkeys(prompt.image for prompt in prompts if prompt.image is not None):
        try:
            open_image(path)
        except ValueError as error:
            if unreadable == "stop":
                raise ValueError(f"{error}; unreadable_images=skip leaves such out") from error
            logger.warning("%s; its prompts are left out", error)
            problems[path] = str(error)
    kept = [prompt for prompt in prompts if prompt.image not in problems]
    if not kept:
        raise ValueError(
            f"no prompt has a readable image; the first: {next(iter(problems.values()))}"
        )
    return kept
