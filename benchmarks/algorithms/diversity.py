"""Sample several images of held-out prompts from adapters, and measure quality and diversity.

python benchmarks/algorithms/diversity.py OUT.jsonl base= after=runs/NAME/checkpoints/checkpoint-40

Diversity is the mean RMS distance between images of one prompt. A sign has one true rendering, so
a perfect model has none: read it beside the scores, which say what was given up for it.
"""

import argparse
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from config import models  # noqa: E402
from config.base import locked_config  # noqa: E402
from flow_grpo import seeds  # noqa: E402
from flow_grpo.data import load_prompts  # noqa: E402
from flow_grpo.models.loading import quiet_libraries  # noqa: E402
from flow_grpo.models.sd3 import SD3  # noqa: E402
from flow_grpo.registry import metric_name  # noqa: E402
from flow_grpo.rewards.base import Samples  # noqa: E402
from flow_grpo.rewards.client import RewardClient  # noqa: E402
from flow_grpo.settings import image_size  # noqa: E402

REWARDS = (
    "ocr",
    "gold.sign_distance:SignDistance",
    "gold.background:Background",
    "gold.second_ocr:SecondOcr",
)


def main() -> None:
    """Write a line a model: mean of every reward with its standard error, and the diversity."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="jsonl file, appended to")
    parser.add_argument("models", nargs="+", help="NAME=FOLDER of an adapter; NAME= is the base")
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--num_images", type=int, default=8, help="of each prompt")
    parser.add_argument("--num_steps", type=int, default=8)
    parser.add_argument("--guidance_scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    quiet_libraries()
    prompts = [p.prompt for p in load_prompts("dataset/tiny_ocr", "test", "general_ocr")]
    prompts = prompts[: args.num_prompts]
    with RewardClient(dict.fromkeys(REWARDS, 1.0)) as client, open(args.out, "a") as file:
        for model in args.models:
            name, _, folder = model.partition("=")
            images = sample(folder, prompts, args)
            line = {"name": name, "adapter": folder, "num_images": len(images)}
            line |= measure(client, images, prompts)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(line, flush=True)


def sample(folder: str, prompts: list[str], args: argparse.Namespace) -> Tensor:
    """Return images (prompts * num_images, 3, h, w) in [0, 1], one prompt's together."""
    config = locked_config()
    models.tiny_sd3(config)
    model = SD3.load(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if folder:
        _sample_script().attach(model.pipeline, folder)
    size = image_size(config)
    places = list(itertools.product(range(len(prompts)), range(args.num_images)))
    images = []
    for start in range(0, len(places), 128):
        part = places[start : start + 128]
        noise = torch.stack([
            seeds.normal(
                model.latent_shape(size), args.seed, seeds.EVAL_NOISE, group=place, member=member
            )
            for place, member in part
        ])  # fmt: skip
        final = model.stock(
            [prompts[place] for place, _ in part],
            noise.to(model.device),
            size=size,
            num_steps=args.num_steps,
            guidance_scale=args.guidance_scale,
        )
        with torch.no_grad():
            images.append(model.decode(final).cpu())
    return torch.cat(images)


def measure(client: RewardClient, images: Tensor, prompts: list[str]) -> dict[str, float]:
    """Return {reward: mean, reward_stderr: ...} and the diversity with its standard error.

    The standard errors are over prompts, whose images are not independent.
    """
    num_images = len(images) // len(prompts)
    of_each = [prompt for prompt in prompts for _ in range(num_images)]
    table = client.submit(Samples(images, of_each, [{}] * len(images))).result()
    columns = {
        metric_name(name): table.values[metric_name(name)].reshape(len(prompts), -1).nanmean(1)
        for name in REWARDS
    }
    columns["diversity"] = torch.tensor(
        [mean_pairwise_distance(group) for group in images.split(num_images)]
    )
    found = {}
    for name, column in columns.items():
        found[name] = column.double().mean().item()
        if len(column) > 1:
            found[f"{name}_stderr"] = column.double().std().item() / len(column) ** 0.5
    return found


def mean_pairwise_distance(images: Tensor) -> float:
    """Return the mean over all pairs of (n, ...) of their RMS difference; NaN for one image."""
    flat = images.flatten(1).double()
    pairs = itertools.combinations(range(len(flat)), 2)
    return float(np.mean([(flat[i] - flat[j]).square().mean().sqrt() for i, j in pairs]))


def _sample_script():
    """Return scripts/sample.py as a module."""
    spec = importlib.util.spec_from_file_location("sample_script", ROOT / "scripts" / "sample.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
