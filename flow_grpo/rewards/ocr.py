"""Reward images that show the text which their prompt quotes, read by RapidOCR."""

import importlib.util
import re
import unicodedata

import numpy as np
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from flow_grpo.rewards.base import NotApplicable, Samples, Scores, score_each, to_uint8

MIN_CONFIDENCE = 0.5  # a line read with less is ignored
# The recogniser pads every line to this (channels, height, width); wider lines stay wide. Its own
# width of 320 only adds padding to short words: at 96, images of 64 x 64 take 13 ms instead of 29
# and are read as well (300 words: 0.990, not 0.977). At 48 single letters suffer (0.958).
LINE_SHAPE = [3, 48, 96]
SETTINGS = {
    "Global.log_level": "error",
    "Global.use_cls": False,  # no search for text that stands upside down
    "Global.text_score": MIN_CONFIDENCE,
    "Det.limit_side_len": 320,  # larger images are shrunk for detection, smaller ones left alone
    "Det.limit_type": "max",
    "Rec.rec_img_shape": LINE_SHAPE,
    "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # parallel by workers, not inside a call
    "EngineConfig.onnxruntime.inter_op_num_threads": 1,
}
CURLY_QUOTES = str.maketrans(dict.fromkeys("\u201c\u201d\u201e\u201f", '"'))


class Ocr:
    """Score 1 - distance / length between what a prompt quotes and what stands in the image.

    One quoted segment: distance 0 if the text read contains it, else the Levenshtein distance to
    all the text, at most the length (the reference's formula). Several: each takes the stretch of
    text that fits it best and no two share a character; distances and lengths are summed. Text is
    compared as `normalised` says. A prompt that quotes nothing is not applicable. Detail `exact`: 1
    if every segment was found whole.
    """

    scope = "sample"
    runs = "thread"

    def __init__(self, device: str = "cpu"):
        self.device = "cpu"  # wherever the model is
        self._engine = _engine()

    @staticmethod
    def check_prompts(prompts: list[str]) -> list[bool]:
        """Say for each prompt whether it quotes some text."""
        return [bool(targets(quoted_segments(prompt))) for prompt in prompts]

    def __call__(self, samples: Samples) -> Scores:
        return score_each(samples, self._score)

    def _score(self, image: Tensor, prompt: str, _metadata: dict) -> tuple[float, dict]:
        segments = quoted_segments(prompt)
        wanted = targets(segments)
        if not wanted:
            reason = "quotes only empty text" if segments else "quotes no text to look for"
            raise NotApplicable(f"the prompt {reason}")
        text = normalised(self.read(to_uint8(image)), "".join(segments))
        distance = text_distance(text, wanted)
        return 1 - distance / sum(map(len, wanted)), {"exact": float(distance == 0)}

    def read(self, pixels: np.ndarray) -> str:
        """Return the text in an image (h, w, 3) uint8 RGB, line after line without separators."""
        result = self._engine(np.ascontiguousarray(pixels[:, :, ::-1]))  # it takes BGR
        return "".join(getattr(result, "txts", None) or ())  # a result without text may lack it


def quoted_segments(prompt: str) -> list[str]:
    """Return the texts between pairs of double quotes, straight or curly; a lone one opens none."""
    return re.findall('"([^"]*)"', prompt.translate(CURLY_QUOTES))


def normalised(text: str, target: str) -> str:
    """Return text as it is compared with a target: lower-cased, letters, marks and digits only.

    Accents are folded unless the target has some; a target without any letter or digit keeps its
    punctuation. Spaces always go.
    """
    has_marks = any(map(unicodedata.combining, unicodedata.normalize("NFKD", target)))
    has_letters = any(map(str.isalnum, target))
    text = unicodedata.normalize("NFKD", text.lower())
    if not has_marks:
        text = "".join(c for c in text if not unicodedata.combining(c))
    text = unicodedata.normalize("NFKC", text)
    kept = "LNM" if has_letters else "LNMPS"  # Unicode's letters, numbers, marks, punctuation, ...
    return "".join(c for c in text if unicodedata.category(c)[0] in kept)


def targets(segments: list[str]) -> list[str]:
    """Return the normalised segments without those of which nothing is left."""
    together = "".join(segments)
    return [target for s in segments if (target := normalised(s, together))]


def text_distance(text: str, wanted: list[str]) -> int:
    """Return how many characters of the wanted strings are not in the text as read.

    Both normalised. At least 0 (each is contained in it), at most the sum of the lengths.
    """
    if len(wanted) == 1:
        target = wanted[0]
        return 0 if target in text else min(Levenshtein.distance(text, target), len(target))
    pieces, missing, distance = [text], [], 0  # pieces: the text that nothing has claimed yet
    for target in sorted(wanted, key=len, reverse=True):
        index = next((i for i, piece in enumerate(pieces) if target in piece), None)
        if index is None:
            missing.append(target)
        else:
            pieces[index : index + 1] = pieces[index].split(target, 1)
    for target in missing:
        stretches = [(*closest_stretch(piece, target), i) for i, piece in enumerate(pieces)]
        cost, start, end, index = min(stretches)
        piece = pieces[index]
        pieces[index : index + 1] = [piece[:start], piece[end:]]
        distance += cost
    return distance


def closest_stretch(text: str, target: str) -> tuple[int, int, int]:
    """Return (distance, start, end) of the substring of text that is nearest to the target.

    Levenshtein's table with a free start and end (Sellers 1980); each cell is (distance, start).
    """
    row = [(j, 0) for j in range(len(target) + 1)]
    best = (len(target), 0, 0)
    for i, character in enumerate(text):
        diagonal, row[0] = row[0], (0, i + 1)
        for j, other in enumerate(target):
            replaced = (diagonal[0] + (character != other), diagonal[1])
            inserted = (row[j][0] + 1, row[j][1])
            deleted = (row[j + 1][0] + 1, row[j + 1][1])
            diagonal, row[j + 1] = row[j + 1], min(replaced, inserted, deleted)
        best = min(best, (*row[-1], i + 1))
    return best


def _engine():
    if not all(map(importlib.util.find_spec, ("rapidocr", "onnxruntime"))):
        raise ImportError("the ocr reward needs RapidOCR: pip install rapidocr onnxruntime")
    import cv2  # both come with rapidocr and take a second to import
    from rapidocr import RapidOCR

    cv2.setNumThreads(1)  # its own threads would fight with torch's; holds for the whole process
    return RapidOCR(params=SETTINGS)
