"""Evaluate pipelines by OCR on held-out prompts, save them, and choose which to keep."""

import copy
import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny_sd3 import build, ocr, render, words

CALLS = {  # what is measured: arguments of the pipeline's call
    "ocr": {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": 0},
    "ocr_cfg3": {"num_inference_steps": 8, "guidance_scale": 3.0, "max_sequence_length": 0},
    "ocr_4_steps": {"num_inference_steps": 4, "guidance_scale": 1.0, "max_sequence_length": 0},
    "ocr_stock_call": {"num_inference_steps": 8, "guidance_scale": 1.0},
}
COLUMNS = ("step", "seconds", "loss", *CALLS)


def sample(pipe, prompts: list[str], call: dict, *, seed: int) -> np.ndarray:
    """Call the stock pipeline; (n, h, w, 3) uint8."""
    images = pipe(prompts, generator=torch.Generator().manual_seed(seed), output_type="np", **call)
    return (images.images * 255.0).round().astype(np.uint8)


def save_grid(images: np.ndarray, path: Path, columns: int = 8) -> None:
    """Write up to 64 images as one PNG."""
    images = images[: len(images[:64]) // columns * columns]
    if len(images):
        num, height, width, _ = images.shape
        rows = images.reshape(num // columns, columns, height, width, 3).transpose(0, 2, 1, 3, 4)
        Image.fromarray(rows.reshape(num // columns * height, columns * width, 3)).save(path)


def save_pipeline(pipe, folder: Path) -> None:
    """Save a diffusers folder: transformer and VAE in half, text encoders as they are."""
    halves = {name: copy.deepcopy(getattr(pipe, name)).half() for name in ("transformer", "vae")}
    type(pipe)(**{**pipe.components, **halves}).save_pretrained(folder)


class Evaluator:
    """Samples at once, reads in the background, and keeps one record a snapshot."""

    def __init__(self, out: Path, *, num_prompts: int, num_workers: int, start: float):
        self.out, self.start = out, start
        self.prompts = words.prompts("test", num_prompts)
        self.targets = [prompt.split('"')[1] for prompt in self.prompts]
        self.reader = ocr.Reader(num_workers)
        self.pending: list[tuple[dict, dict]] = []
        self.records: list[dict] = []

    def measure(self, pipe, seed: int = 0) -> tuple[dict, np.ndarray]:
        """Sample for every call; return futures by column, and the images of the first."""
        images = {name: sample(pipe, self.prompts, call, seed=seed) for name, call in CALLS.items()}
        futures = {name: self.reader.submit(i, self.prompts) for name, i in images.items()}
        return futures, images["ocr"]

    def means(self, futures: dict) -> dict[str, float]:
        """Wait for the readings; mean reward by column and the standard error of the first."""
        means = {}
        for name, some in futures.items():
            rewards = [future.result() for future in some]
            means[name] = float(np.mean(rewards))
            if name == "ocr":
                means["ocr_stderr"] = float(np.std(rewards) / math.sqrt(len(rewards)))
        return means

    @torch.no_grad()
    def measure_reconstruction(self, image_coder) -> float:
        """Draw the held-out signs, send them through the VAE, and return their mean reward."""
        names = list(words.COLORS)
        colors = [names.index(prompt.split()[-2]) for prompt in self.prompts]
        drawn = render.compose(
            torch.from_numpy(render.masks(self.targets)).float(),
            torch.from_numpy(render.palettes()[colors]).float(),
        )
        pixels = drawn.to(image_coder.device) / 127.5 - 1.0
        decoded = image_coder.decode(image_coder.encode(pixels).latent_dist.mean).sample
        images = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1)
        save_grid(images.cpu().numpy(), self.out / "reconstructions.png")
        scored = self.reader.submit(images.cpu().numpy(), self.prompts)
        return float(np.mean([future.result() for future in scored]))

    def __call__(self, pipe, step: int, loss: float) -> None:
        """Evaluate and save a snapshot as out/step-XXXXXX; print what has been read so far."""
        record = {"step": step, "seconds": time.monotonic() - self.start, "loss": loss}
        futures, images = self.measure(pipe)
        save_grid(images, self.out / f"samples-{step:06d}.png")
        save_pipeline(pipe, self.out / f"step-{step:06d}")
        self.collect()
        self.pending.append((record, futures))

    def collect(self) -> None:
        """Finish the pending snapshots: print a row and write evaluations.jsonl."""
        for record, futures in self.pending:
            record.update(self.means(futures))
            if not self.records:
                print(" | ".join(f"{name:>14}" for name in COLUMNS), flush=True)
            print(" | ".join(f"{record[name]:14.4g}" for name in COLUMNS), flush=True)
            self.records.append(record)
            with open(self.out / "evaluations.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        self.pending.clear()

    def keep_nearest(self, target: float, num: int) -> list[dict]:
        """Delete all snapshots but the num whose reward is nearest to the target."""
        self.collect()
        ranked = sorted(self.records, key=lambda record: abs(record["ocr"] - target))
        for record in ranked[num:]:
            shutil.rmtree(self.out / f"step-{record['step']:06d}")
        return sorted(ranked[:num], key=lambda record: record["step"])

    def measure_saved(self, folder: Path, device) -> dict[str, float]:
        """Evaluate a folder as its user would load it."""
        futures, _ = self.measure(build.load(folder).to(device))
        return self.means(futures)
