"""Score images by OCR in worker processes; light enough to be imported by each of them."""

import multiprocessing
import re
import unicodedata
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np

_engine = None


def normalise(text: str) -> str:
    """Fold accents, lower the case, keep letters and digits only."""
    folded = unicodedata.normalize("NFKD", text).lower()
    return re.sub(r"[^a-z0-9]", "", folded)


def edit_distance(first: str, second: str) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, 1):
        above, row[0] = row[0], i
        for j, right in enumerate(second, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (left != right))
    return row[-1]


def reward(read: str, target: str) -> float:
    """Return 1 - distance / length, in [0, 1]; 1 where the target is contained in what was read."""
    read, target = normalise(read), normalise(target)
    distance = 0 if target in read else min(edit_distance(read, target), len(target))
    return 1.0 - distance / len(target)


def read(image: np.ndarray) -> str:
    """Read one (h, w, 3) uint8 RGB image with this process's own engine, one thread."""
    global _engine
    if _engine is None:
        from rapidocr import RapidOCR

        _engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,
                "Det.limit_side_len": 320,
                "Det.limit_type": "max",
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
    return "".join(_engine(np.ascontiguousarray(image[:, :, ::-1])).txts or ())


class Reader:
    """A pool of spawned processes, each with one OCR engine; close() it."""

    def __init__(self, num_workers: int):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(num_workers, mp_context=context)

    def submit(self, images: np.ndarray) -> list[Future]:
        """Start reading (n, h, w, 3) uint8 images; one future text each."""
        return [self.pool.submit(read, image) for image in images]

    def score(self, images: np.ndarray, targets: list[str]) -> list[float]:
        """Read and score (n, h, w, 3) uint8 images against their targets."""
        texts = [future.result() for future in self.submit(images)]
        return [reward(text, target) for text, target in zip(texts, targets, strict=True)]

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
