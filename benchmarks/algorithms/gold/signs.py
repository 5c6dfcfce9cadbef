"""Draw what a prompt asks for, with the code that drew the pretraining images."""

import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

from flow_grpo.rewards.base import NotApplicable
from flow_grpo.rewards.ocr import quoted_segments

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

from tiny_sd3 import render, words

SIZE = render.SIZE
MARGIN = 2  # pixels that a text may be off its place, and that its box is wider for
TEXT_ROWS = slice(render.TOP - MARGIN, render.TOP + render.GLYPH_HEIGHT + MARGIN)
SHIFTS = range(-MARGIN, MARGIN + 1)


def word_and_color(prompt: str) -> tuple[str, str]:
    """Return the word and the colour's name; NotApplicable if it is no prompt of the template."""
    segments = quoted_segments(prompt)
    color = prompt.split()[-2] if len(prompt.split()) > 1 else ""
    word = segments[0] if len(segments) == 1 else ""
    if prompt != words.prompt(word, color) or color not in words.COLORS or not word:
        raise NotApplicable(f"{prompt!r} does not follow {words.TEMPLATE!r}")
    return word, color


def applies(prompt: str) -> bool:
    """Say whether a prompt follows the template."""
    try:
        word_and_color(prompt)
    except NotApplicable:
        return False
    return True


@lru_cache(maxsize=512)
def renderings(word: str, color: str) -> np.ndarray:
    """Return every rendering that counts as true; (50, 3, SIZE, SIZE) float32 in [0, 1].

    Pretraining drew a word at one place in one text colour. Here it may be off by up to MARGIN
    pixels each way, since no reward should ask for more, and light or dark.
    """
    padded = np.pad(render.masks([word])[0], MARGIN)
    places = [slice(MARGIN + shift, MARGIN + shift + SIZE) for shift in SHIFTS]
    shifted = np.stack([padded[rows, columns] for rows in places for columns in places])
    palettes = np.array(
        [(words.COLORS[color], text) for text in (render.LIGHT, render.DARK)], dtype=np.float32
    )
    drawn = [render.compose(shifted.astype(np.float32), palette[None]) for palette in palettes]
    return (np.concatenate(drawn) / 255).astype(np.float32)


def canonical(prompts: list[str]) -> np.ndarray:
    """Return the pretraining images of prompts; (n, 3, SIZE, SIZE) float32 in [0, 1]."""
    pairs = [word_and_color(prompt) for prompt in prompts]
    names = list(words.COLORS)
    masks = render.masks([word for word, _ in pairs]).astype(np.float32)
    palettes = render.palettes()[[names.index(color) for _, color in pairs]].astype(np.float32)
    return (render.compose(masks, palettes) / 255).astype(np.float32)
