"""Words and prompts of the embedded pipeline: capital letters, split by hash."""

import hashlib
import itertools
import random
from collections.abc import Iterator

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VOWELS = "AEIOU"
CONSONANTS = "".join(letter for letter in LETTERS if letter not in VOWELS)
LENGTHS, LENGTH_WEIGHTS = (2, 3, 4), (1, 3, 6)
SPEAKABLE = 0.6  # share of words whose consonants and vowels alternate; the rest are any letters
COLORS = {
    "red": (200, 30, 35),
    "green": (25, 125, 55),
    "blue": (35, 60, 190),
    "purple": (115, 40, 145),
    "black": (20, 20, 22),
    "yellow": (245, 215, 60),
    "pink": (245, 165, 190),
    "white": (245, 245, 242),
}
TEMPLATE = '"{word}" on a {color} sign'
TEMPLATE_WORDS = ("on", "a", "sign", *COLORS)
SPLITS = {"pretrain": range(60), "train": range(60, 85), "test": range(85, 100)}


def split_of(word: str) -> str:
    """Name the one split that a word belongs to; a hash of its letters decides."""
    bucket = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % 100
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def draw_words(split: str, *, seed: int = 0) -> Iterator[str]:
    """Draw words of a split without end; a word may come again."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; allowed: {', '.join(SPLITS)}")
    rng = random.Random(f"{split}/{seed}")
    while True:
        length = rng.choices(LENGTHS, LENGTH_WEIGHTS)[0]
        if rng.random() < SPEAKABLE:
            kinds = (CONSONANTS, VOWELS) if rng.random() < 0.75 else (VOWELS, CONSONANTS)
            word = "".join(rng.choice(kinds[i % 2]) for i in range(length))
        else:
            word = "".join(rng.choices(LETTERS, k=length))
        if split_of(word) == split:
            yield word


def words(split: str, num: int, *, seed: int = 0) -> list[str]:
    """Return num different words of a split."""
    found: dict[str, None] = {}
    for word in draw_words(split, seed=seed):
        found.setdefault(word)
        if len(found) == num:
            return list(found)
    raise AssertionError("draw_words never ends")


def prompt(word: str, color: str) -> str:
    """Put a word and a background colour into the template."""
    return TEMPLATE.format(word=word, color=color)


def prompts(split: str, num: int, *, seed: int = 0) -> list[str]:
    """Return num different prompts of a split, a word once each; the colours take turns."""
    pairs = zip(words(split, num, seed=seed), itertools.cycle(COLORS))
    return [prompt(word, color) for word, color in pairs]
