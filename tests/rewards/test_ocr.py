"""The OCR reward reads real rendered text, and its distances equal an exhaustive search."""

import functools
import importlib.util
import itertools

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flow_grpo.rewards.base import Samples, State
from flow_grpo.rewards.ocr import (
    Ocr,
    closest_stretch,
    normalised,
    quoted_segments,
    targets,
    text_distance,
)

WORDS = ("HELLO", "STOP", "CAFE", "ZEBRA", "WIND", "MUSIC", "RUN", "OPEN")


def sign(text, size=64, font_size=17, colours=("navy", "white")):
    """Return an image (3, size, size) of the text."""
    image = Image.new("RGB", (size, size), colours[0])
    font = ImageFont.load_default(font_size)
    draw = ImageDraw.Draw(image)
    draw.multiline_text((size / 2, size / 2), text, fill=colours[1], font=font, anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def ocr():
    return Ocr()


def score(ocr, image, prompt):
    """Return (value, exact, state, reason) of one sample."""
    scores = ocr(Samples(image[None], [prompt], [{}]))
    exact = scores.details.get("exact", torch.tensor([torch.nan]))
    return scores.values.item(), exact.item(), scores.states.item(), scores.reasons[0]


def test_rendered_words_are_read(ocr):
    pairs = [("navy", "white"), ("gold", "black"), ("darkgreen", "yellow"), ("white", "red")]
    images = [sign(w, colours=c) for w, c in zip(WORDS, itertools.cycle(pairs), strict=False)]
    prompts = [f'"{word}" on a sign' for word in WORDS]
    scores = ocr(Samples(torch.stack(images), prompts, [{}] * len(WORDS)))
    assert scores.values.tolist() == [1.0] * len(WORDS)
    assert scores.details["exact"].tolist() == [1.0] * len(WORDS)


def test_another_word_is_scored_by_its_distance(ocr):
    # HELLO -> HELP: one letter replaced, one too many: 2 of the 4 letters of HELP are wrong
    assert score(ocr, sign("HELLO"), '"HELP" on a sign')[:2] == (0.5, 0.0)
    # nothing in common with the longer text: the distance is cut at the length
    assert score(ocr, sign("HELLO"), '"MINT"')[:2] == (0.0, 0.0)


def test_text_in_an_image_of_noise_scores_nothing(ocr):
    noise = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    for image in (noise, torch.zeros(3, 64, 64), torch.ones(3, 64, 64)):
        assert score(ocr, image, '"A"')[:3] == (0.0, 0.0, State.OK)


def test_larger_images_and_lines_wider_than_the_recogniser_s_are_read(ocr):
    image = sign("WELCOME TO\nTHE HARBOR", size=256, font_size=34)
    assert score(ocr, image, 'a wall that says "Welcome to the harbor!"')[:2] == (1.0, 1.0)


def test_several_segments_share_the_score_by_length(ocr):
    image = sign("OPEN\nZEBRA", size=96, font_size=22)
    assert score(ocr, image, 'a "ZEBRA" and \u201copen\u201d')[:2] == (1.0, 1.0)
    value, exact, *_ = score(ocr, image, 'a "ZEBRA" and a "MILK"')  # MILK has 4 of 9 letters
    assert (value, exact) == (pytest.approx(5 / 9), 0.0)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a sign", "the prompt quotes no text to look for"),
        ('a 5" pipe', "the prompt quotes no text to look for"),
        ('a "" sign', "the prompt quotes only empty text"),
        ('a "  " sign', "the prompt quotes only empty text"),
    ],
)
def test_a_prompt_that_quotes_nothing_is_not_applicable(ocr, prompt, reason):
    value, exact, state, said = score(ocr, sign("STOP"), prompt)
    assert (state, said) == (State.NOT_APPLICABLE, reason)
    assert np.isnan([value, exact]).all()
    assert Ocr.check_prompts([prompt, 'a "STOP" sign']) == [False, True]


def scribble(seed):
    """Return an image (64, 64, 3) uint8 of six strokes that look like letters at most by chance."""
    generator = np.random.default_rng(seed)
    image = Image.new("RGB", (64, 64), "white")
    for left in range(0, 48, 8):
        points = generator.integers((left + 4, 22), (left + 16, 40), (4, 2))
        ImageDraw.Draw(image).line([tuple(point) for point in points.tolist()], "black", 2)
    return np.array(image)


def test_text_read_with_low_confidence_is_ignored(ocr, monkeypatch):
    scribbles = [scribble(seed) for seed in range(8)]
    certain = [ocr.read(image) for image in scribbles]
    monkeypatch.setattr(ocr._engine, "text_score", 0.0)
    everything = [ocr.read(image) for image in scribbles]
    doubtful = [text for text, kept in zip(everything, certain, strict=True) if text and not kept]
    assert len(doubtful) >= 2  # the recogniser makes letters of strokes, and says it is not sure


@pytest.mark.parametrize(
    ("prompt", "segments"),
    [
        ('"A" and "B c"', ["A", "B c"]),
        ("\u201cA\u201d and \u201eB\u201f", ["A", "B"]),
        ('"A\u201d', ["A"]),
        ("it's 'A'", []),
        ('"A" and "B', ["A"]),
        ("", []),
    ],
)
def test_segments_stand_between_double_quotes(prompt, segments):
    assert quoted_segments(prompt) == segments


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("HOT\u00c9L, 24 h!", "HOTEL 24h", "hotel24h"),
        ("cafe\u0301", "CAF\u00c9", "caf\u00e9"),  # a target with accents keeps them
        ("CAFE", "CAF\u00c9", "cafe"),
        ("\u30ac\u30b9", "\u30ac\u30b9", "\u30ac\u30b9"),  # Japanese: the mark makes the letter
        ("\ud55c\uad6d", "\ud55c\uad6d", "\ud55c\uad6d"),  # Korean stays composed
        ("\uff21\uff22 \u2460", "AB1", "ab1"),  # full width and circled forms
        ("! ?", "!?", "!?"),  # nothing else to compare
        ("Sale!", "!?", "sale!"),
        ("a\0b\n", "ab", "ab"),
    ],
)
def test_text_is_compared_by_letters_and_digits(text, target, expected):
    assert normalised(text, target) == expected


def test_segments_without_letters_count_only_by_themselves():
    assert targets(["HELLO", "!!"]) == ["hello"]
    assert targets(["!!"]) == ["!!"]


@functools.cache
def slow_distance(a, b):
    """Return the Levenshtein distance by its definition."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        slow_distance(a[1:], b) + 1,
        slow_distance(a, b[1:]) + 1,
        slow_distance(a[1:], b[1:]) + (a[0] != b[0]),
    )


def strings(alphabet, lengths):
    return ["".join(s) for k in lengths for s in itertools.product(alphabet, repeat=k)]


def test_one_segment_is_scored_by_the_reference_s_formula():
    for text, target in itertools.product(strings("ab", range(5)), strings("ab", range(1, 4))):
        expected = 0 if target in text else min(slow_distance(text, target), len(target))
        assert text_distance(text, [target]) == expected


def test_the_closest_stretch_is_the_best_of_all_substrings():
    short = itertools.product(strings("abc", (0, 3, 5)), strings("abc", (1, 2, 3)))
    for text, target in [*short, ("abxcd", "abcd"), ("abcdeabxcde", "bcxde"), ("aabb", "abab")]:
        cuts = itertools.combinations(range(len(text) + 1), 2)
        candidates = ["", *(text[i:j] for i, j in cuts)]
        distance, start, end = closest_stretch(text, target)
        assert distance == min(slow_distance(piece, target) for piece in candidates)
        assert slow_distance(text[start:end], target) == distance


@pytest.mark.parametrize(
    ("text", "wanted", "distance"),
    [
        ("openzebra", ["zebra", "open"], 0),  # any order
        ("zebraopen", ["zebra", "open"], 0),
        ("highhi", ["hi", "high"], 0),
        ("high", ["hi", "high"], 2),  # the longer one has used it up
        ("hello", ["hello", "hello"], 5),  # asked for twice, written once
        ("helloworid", ["hello", "world"], 1),  # the other's text does not count against it
        ("helhellolo", ["hello", "hello"], 2),  # what is left is hel and lo, not hello
        ("", ["ab", "c"], 3),
    ],
)
def test_several_segments_share_no_character(text, wanted, distance):
    assert text_distance(text, wanted) == distance


def test_a_missing_engine_is_one_line_that_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rapidocr" else find(name)
    )
    with pytest.raises(ImportError, match=r"^the ocr reward needs .*: pip install rapidocr"):
        Ocr()


def test_two_threads_read_the_same_as_one(ocr):
    import concurrent.futures

    samples = Samples(torch.stack([sign(w) for w in WORDS]), [f'"{w}"' for w in WORDS], [{}] * 8)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(ocr, [samples] * 4))
    assert all(r.values.tolist() == [1.0] * len(WORDS) for r in results)
