"""Score images by the package's OCR reward in worker processes."""

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np

_reward = None


def score(image: np.ndarray, prompt: str) -> float:
    """Return the OCR reward of one (h, w, 3) uint8 image, by this process's own engine."""
    global _reward
    import torch

    from flow_grpo.rewards.base import Samples
    from flow_grpo.rewards.ocr import Ocr

    _reward = _reward or Ocr()
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    return float(_reward(Samples(pixels, [prompt], [{}])).values)


class Reader:
    """A pool of spawned processes, each with one OCR engine; close() it."""

    def __init__(self, num_workers: int):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(num_workers, mp_context=context)

    def submit(self, images: np.ndarray, prompts: list[str]) -> list[Future]:
        """Start scoring (n, h, w, 3) uint8 images; one future reward each."""
        return [self.pool.submit(score, i, p) for i, p in zip(images, prompts, strict=True)]

    def close(self) -> None:
        """End the workers."""
        self.pool.shutdown(cancel_futures=True)
