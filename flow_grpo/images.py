"""Read reference images from disk, tell them apart by content, and check them before a run."""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flow_grpo.data import Prompt

logger = logging.getLogger(__name__)

UNREADABLE = ("stop", "skip")
DEEP = ("I", "F")  # first letter of PIL's modes of more than 8 bits, which it would clip


def open_image(path: Path):
    """Return an image file as a PIL image, RGB, decoded, turned as its EXIF data says.

    Raises:
        ValueError: there is no such file, or it holds no whole image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode.startswith(DEEP):
                raise ValueError(f"it is grey of more than 8 bits ({image.mode}); save it as RGB")
            return ImageOps.exif_transpose(image).convert("RGB")
    except (
        OSError, SyntaxError, ValueError, RuntimeError, Image.DecompressionBombError
    ) as error:  # fmt: skip
        if not path.is_file():
            raise ValueError(f"reference image {path} does not exist") from error
        raise ValueError(f"reference image {path} cannot be read: {error}") from error


def open_images(paths: Iterable[Path]) -> tuple:
    """Return image files as PIL images, RGB, decoded; raise as `open_image` does."""
    return tuple(map(open_image, paths))


@functools.lru_cache(maxsize=4)  # the batches of a group follow each other; photographs are large
def image_tensor(path: Path) -> Tensor:
    """Return an image file as (3, h, w) float32 in [0, 1]; not to be written to."""
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


def check_counts(prompts: Sequence[Prompt], family: str, most: int) -> None:
    """Raise ValueError if a prompt has not 1 to `most` reference images, as many as the others."""
    for prompt in prompts:
        if 1 <= len(prompt.images) <= most:
            continue
        takes = "one reference image" if most == 1 else f"1 to {most} reference images"
        raise ValueError(
            f"{prompt.source}: {len(prompt.images) or 'no'} reference images, but {family} takes "
            f'{takes} for every prompt, named by the "image" of a .jsonl line (prompt_fn geneval), '
            "as in dataset/counting_edit"
        )
    num = len(prompts[0].images)
    for prompt in prompts:
        if len(prompt.images) != num:
            raise ValueError(
                f"{prompt.source}: {len(prompt.images)} reference images, but {num} in "
                f"{prompts[0].source}; all prompts of a file must have the same number"
            )


def with_readable_images(
    prompts: Sequence[Prompt],
    unreadable: str,
    *,
    share: slice = slice(None),
    gathered: Callable[[list], list] = list,
) -> list[Prompt]:
    """Return the prompts all of whose reference images can be decoded.

    Args:
        prompts: in order.
        unreadable: "stop" raises at the first line that has another, "skip" leaves such lines out
            and names them in the log.
        share: the files that this process decodes, of all.
        gathered: joins the lists of all processes, so that each learns what all have found.

    Raises:
        ValueError: such a line, or none left.
    """
    files = list(dict.fromkeys(path for prompt in prompts for path in prompt.images))
    problems = dict(gathered(_problems(files[share])))
    broken = [prompt for prompt in prompts if not problems.keys().isdisjoint(prompt.images)]
    if not broken:
        return list(prompts)
    told = [
        f"{prompt.source}: {next(problems[path] for path in prompt.images if path in problems)}"
        for prompt in broken
    ]
    if unreadable == "stop":
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        raise ValueError(f"{told[0]}{more}; unreadable_images=skip leaves such lines out")
    if len(broken) == len(prompts):
        raise ValueError(f"no prompt is left that has readable images; the first: {told[0]}")
    for line in told:
        logger.warning("left out: %s", line)
    logger.warning("%d of %d prompts are left out for their images", len(broken), len(prompts))
    return [prompt for prompt in prompts if problems.keys().isdisjoint(prompt.images)]


def _problems(files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return (file, what is wrong with it) of those that cannot be decoded."""
    found = []
    for path in files:
        try:
            open_image(path)
        except ValueError as error:
            found.append((path, str(error)))
    return found
