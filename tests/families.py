"""The model families that tests go through, each with a random pipeline made from its config."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from config.base import locked_config
from flow_grpo import registry

MODELS = "flow_grpo.models"


class Family(NamedTuple):
    """What a family is for presets and tests; its key in `FAMILIES` is its file's name."""

    builder: str  # module:function of the random pipeline
    call: str  # module:function: what the unpatched pipeline's call takes, see `unpatched`
    hub_ids: tuple[str, ...]  # of presets, `pretrained.model`
    script: str  # scripts/NAME.py
    arguments: Mapping = MappingProxyType({})  # of the builder
    returned: str = ""  # module:function (pipeline, latents that its call returns) -> x; "": these
    length: int = 48  # sample.max_sequence_length
    num_frames: int = 1  # of a clip; 1 for images
    references: int = 0  # reference images of a prompt
    reference_resolution: int = 1024
    one_by_one: bool = False  # the unpatched pipeline takes one prompt a call
    guidance_scale: float = 4.0
    sizes: tuple[tuple[int, int], ...] = ((32, 32), (16, 40))  # height and width: square, wide
    absent_targets: frozenset[str] = frozenset()  # of other members of the family
    # Modules whose adapter has a gradient that is 0.
    still: frozenset[str] = frozenset()
    # Least root mean square, over every sample, by which another input changes the velocity. All
    # were measured to be 2.4e-2 at least, and a reference image's 5.4e-3; equality is 1e-5.
    effects: Mapping = MappingProxyType({"prompt": 1e-2, "guidance": 1e-2, "sigma": 1e-2})
    # Measured: largest |v(batch of 2, 4, 8) - v(batch of 1)| over v's standard deviation, fp32,
    # 3 seeds, both sizes, on a CPU with one thread. In bf16 it was 0 for every family.
    batch_effect: float = 1e-6

    def pipeline(self):
        """Return a new random pipeline."""
        return _named(self.builder)(**self.arguments)


def _named(path: str) -> Callable:
    """Return a function by its `module:function`."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


FAMILIES = {
    "sd3": Family(
        "tiny_models:sd3",
        "tiny_models:own_arguments",
        ("stabilityai/stable-diffusion-3.5-medium", "flow_grpo/assets/tiny_sd3"),
        "train_sd3",
        {"with_t5": True},
        still=frozenset(("transformer_blocks.1.attn.add_q_proj",)),
        batch_effect=4.8e-6,
    ),
    "flux": Family(
        "tiny_flux:flux",
        "tiny_flux:own_arguments",
        ("black-forest-labs/FLUX.1-dev",),
        "train_flux",
        batch_effect=0.8e-6,
    ),
    "flux_kontext": Family(
        "tiny_flux:flux_kontext",
        "tiny_flux:own_edit_arguments",
        ("black-forest-labs/FLUX.1-Kontext-dev",),
        "train_flux_kontext",
        references=1,
        effects={"prompt": 1e-2, "guidance": 1e-2, "sigma": 1e-2, "reference": 2e-3},
        batch_effect=0.8e-6,
    ),
    "qwenimage": Family(
        "tiny_qwen:qwenimage",
        "tiny_qwen:own_arguments",
        ("Qwen/Qwen-Image",),
        "train_qwenimage",
        # The queries of the last block's text: what attention makes of them goes nowhere.
        still=frozenset(("transformer_blocks.1.attn.add_q_proj",)),
        batch_effect=2.5e-6,
    ),
    "qwenimage_edit": Family(
        "tiny_qwen_edit:qwenimage_edit",
        "tiny_qwen_edit:own_arguments",
        ("Qwen/Qwen-Image-Edit",),
        "train_qwenimage_edit",
        references=1,
        reference_resolution=64,
        one_by_one=True,
        sizes=((32, 32), (16, 32)),  # 64 * 64 pixels of these shapes: 64 x 64, 32 x 96
        effects={"prompt": 1e-2, "guidance": 1e-2, "sigma": 1e-2, "reference": 1e-2},
        still=frozenset(("transformer_blocks.1.attn.add_q_proj",)),
        batch_effect=4.2e-6,
    ),
    "qwenimage_edit_plus": Family(
        "tiny_qwen_edit:qwenimage_edit_plus",
        "tiny_qwen_edit:own_plus_arguments",
        ("Qwen/Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2511"),
        "train_qwenimage_edit_plus",
        {"zero_cond_t": True},  # as -2511
        references=2,
        reference_resolution=64,
        one_by_one=True,
        sizes=((32, 32), (16, 32)),
        effects={"prompt": 1e-2, "guidance": 1e-2, "sigma": 1e-2, "reference": 1e-2},
        still=frozenset(("transformer_blocks.1.attn.add_q_proj",)),
        batch_effect=3.2e-6,
    ),
    "wan2_1": Family(
        "tiny_wan:wan",
        "tiny_wan:own_arguments",
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",),
        "train_wan2_1",
        num_frames=5,
        sizes=((32, 32), (16, 48)),  # the pipeline asks for multiples of 16
        # Of Wan's image-to-video.
        absent_targets=frozenset(("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")),
        batch_effect=5.4e-6,
    ),
    "zimage": Family(
        "tiny_zimage:zimage",
        "tiny_zimage:own_arguments",
        ("Tongyi-MAI/Z-Image",),
        "train_zimage",
        batch_effect=4.3e-6,
    ),
    "flux2_klein": Family(
        "tiny_flux2:flux2_klein",
        "tiny_flux2:own_arguments",
        ("black-forest-labs/FLUX.2-klein-base-4B",),
        "train_flux2_klein",
        returned="tiny_flux2:returned",
        # Of larger members, which have more blocks.
        absent_targets=frozenset(
            f"single_transformer_blocks.{i}.attn.to_out" for i in range(2, 48)
        ),
        batch_effect=4.4e-6,
    ),
}


def adapter(name: str) -> type:
    """Return a family's adapter."""
    return registry.load(MODELS, name)


def family_of(model: str) -> str:
    """Return the family that a preset's `pretrained.model` belongs to."""
    (name,) = [name for name, family in FAMILIES.items() if model in family.hub_ids]
    return name


def values(name: str, folder: str) -> dict:
    """Return {key: value} of the settings that a family's adapter loads `folder` by, in fp32."""
    family = FAMILIES[name]
    return {
        "pretrained.model": folder,
        "mixed_precision": "no",
        "resolution": family.sizes[0][0],
        "width": 0,
        "num_frames": family.num_frames,
        "reference_resolution": family.reference_resolution,
        "sample.max_sequence_length": family.length,
        "sample.guidance_scale": family.guidance_scale,
        "eval.guidance_scale": family.guidance_scale,
    }


def settings(name: str, folder: str, **changes):
    """Return a configuration of these `values`, but for `changes`."""
    config = locked_config()
    config.update_from_flattened_dict({**values(name, folder), **changes})
    return config


@torch.no_grad()
def unpatched(
    name: str,
    pipeline,
    prompts: Sequence[str],
    x: Tensor,
    images: Sequence[Sequence] | None = None,
    *,
    size: tuple[int, int],
    num_steps: int,
    guidance_scale: float,
    output_type: str = "latent",
) -> Tensor:
    """Call a pipeline that no adapter has touched, from x (b, *latent) at sigma 1.

    The family's `call` (pipeline, x, images, size, guidance_scale) returns the arguments beside
    those that all families have; it may set up the pipeline, too.

    Args:
        name: of the family.
        pipeline: its own.
        prompts: b texts.
        x: in the adapter's layout.
        images: b lists of reference images (PIL), as large as the image to make.
        size: height and width, pixels.
        num_steps: of the sampler.
        guidance_scale: 1 for none.
        output_type: latent or pt.

    Returns:
        Latents as x's, or pixels in [0, 1] for `output_type` pt.
    """
    family, found = FAMILIES[name], []
    pipeline.set_progress_bar_config(disable=True)
    step = 1 if family.one_by_one else len(prompts)
    for first in range(0, len(prompts), step):
        rows = slice(first, first + step)
        own = _named(family.call)(pipeline, x[rows], images and images[rows], size, guidance_scale)
        found.append(
            pipeline(
                prompt=list(prompts[rows]),
                height=size[0],
                width=size[1],
                num_inference_steps=num_steps,
                max_sequence_length=family.length,
                output_type=output_type,
                return_dict=False,
                **own,
            )[0]
        )
    result = torch.cat(found)
    if output_type != "latent":
        return result
    return (_named(family.returned)(pipeline, result) if family.returned else result).reshape(
        x.shape
    )
