"""Save a family's tiny random pipeline, load it through its adapter, and show what that says.

python tests/show_family.py zimage runs/tiny_zimage
"""

import re
import sys
from collections import Counter
from pathlib import Path

import tiny_flux
import torch
from families import FAMILIES, adapter, settings

from flow_grpo import lora
from flow_grpo.models.loading import quiet_libraries


def show(name: str, folder: str) -> str:
    """Return the description; the pipeline lies in `folder` then."""
    family, size = FAMILIES[name], FAMILIES[name].sizes[0]
    Path(folder).mkdir(parents=True, exist_ok=True)
    family.pipeline().save_pretrained(folder)
    model = adapter(name).load(settings(name, folder), torch.device("cpu"))
    images = [[tiny_flux.image(place) for place in range(family.references)]]
    with torch.no_grad():
        cond = model.encode(
            model.transformer,
            ["a sign"],
            images if family.references else None,
            size=size,
            negative=model.negative,
        )
    lora.add(model.transformer, targets=model.lora_targets, rank=1, alpha=1)
    keys = [key for key in lora.state(model.transformer) if "lora_A" in key]
    parts = [re.fullmatch(r"(\w+)\.\d+\.(.*)\.lora_A\.weight", key).groups() for key in keys]
    adapted = {}
    for (block, module), count in Counter(parts).items():
        adapted.setdefault(f"adapter in {count} {block}", []).append(module)
    told = model.negative is None
    lines = [
        ("pipeline", f"{model.pipeline_class} in {folder}"),
        ("sizes", f"multiples of {model.size_unit} pixels"),
        ("latents", f"{model.latent_shape(size)} at {size[0]} x {size[1]} pixels"),
        ("sigmas", " ".join(f"{sigma:.4f}" for sigma in model.sigmas(4, size))),
        ("guidance", "a number it is told" if told else f"two branches, {model.guide.__name__}"),
        ("fp16", f"no: {model.no_fp16}" if model.no_fp16 else "yes"),
        *((key, f"{tuple(t.shape)} {t.dtype}") for key, t in cond.tensors.items()),
        *((blocks, ", ".join(modules)) for blocks, modules in adapted.items()),
    ]
    width = max(len(key) for key, _ in lines)
    return "".join(f"{key:<{width}}  {value}\n" for key, value in lines)


if __name__ == "__main__":
    quiet_libraries()
    sys.stdout.write(show(*sys.argv[1:]))
