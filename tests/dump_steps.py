"""Take two optimizer steps with every family on the back-end of the launch; for test_backends.py.

    accelerate launch --config_file FILE.yaml tests/dump_steps.py OUT FOLDERS.json

FOLDERS.json holds {family: folder of its pipeline}. All ranks see the same, so that what they learn
is what one process learns. The main process writes OUT/<family>.safetensors: the trained weights,
and a velocity of these and of the reference.
"""

import json
import os
import sys
from pathlib import Path

import families
import torch
from PIL import Image
from safetensors.torch import save_file

from flow_grpo import seeds
from flow_grpo.policy import Policy
from flow_grpo.processes import accelerator_of_launch


def dump(name: str, folder: str, out: Path, accelerator) -> None:
    """Train one family's adapter."""
    family, config = families.FAMILIES[name], families.settings(name, folder)
    model = families.adapter(name).load(config, accelerator.device)
    policy = Policy(model, config, accelerator)
    size, scale = family.sizes[0], family.guidance_scale
    references = [[Image.new("RGB", size[::-1], "teal")] * family.references] * 2
    cond = model.encode(
        policy.module, ["a cat", "a dog"], references if family.references else None,
        size=size, negative=model.negative,
    )  # fmt: skip
    x = seeds.normal((2, *model.latent_shape(size)), 0, seeds.INITIAL_NOISE).to(accelerator.device)
    sigma = torch.tensor([0.8, 0.4], device=accelerator.device)
    for update in range(2):
        for rows in (slice(0, 1), slice(1, 2)):
            with policy.accumulate(sync=rows.stop == 2):
                v = policy.velocity(x[rows], sigma[rows], cond.index(rows), scale)
                policy.backward(v.square().mean() / 2)
        policy.step(update, 1e-3)
    with torch.no_grad():
        found = {
            which: policy.velocity(x, sigma, cond, scale, weights=which)
            for which in ("current", "reference", "ema")
        }
    found |= policy.state()["parameters"]
    if accelerator.is_main_process:
        save_file({k: t.contiguous().cpu() for k, t in found.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    out, folders = map(Path, sys.argv[1:])
    launched = accelerator_of_launch("no")
    for family, folder in json.loads(folders.read_text()).items():
        dump(family, folder, out, launched)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Gloo's threads sometimes abort the interpreter's own end, after all work is done.
    os._exit(0)
