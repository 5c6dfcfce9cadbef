"""The model families that tests go through, each with a random pipeline made from its config."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from flow_grpo import registry

MODELS = "flow_grpo.models"


class Family(NamedTuple):
    """What a family is for presets and tests; its key in `FAMILIES` is its file's name."""

    builder: str  # module:function of the random pipeline
    hub_ids: tuple[str, ...]  # of presets, `pretrained.model`
    script: str  # scripts/NAME.py
    arguments: Mapping = MappingProxyType({})  # of the builder

    def pipeline(self):
        """Return a new random pipeline."""
        module, _, function = self.builder.partition(":")
        return getattr(importlib.import_module(module), function)(**self.arguments)


FAMILIES = {
    "sd3": Family(
        "tiny_models:sd3",
        ("stabilityai/stable-diffusion-3.5-medium", "flow_grpo/assets/tiny_sd3"),
        "train_sd3",
        {"with_t5": True},
    ),
    "flux": Family("tiny_flux:flux", ("black-forest-labs/FLUX.1-dev",), "train_flux"),
    "flux_kontext": Family(
        "tiny_flux:flux_kontext", ("black-forest-labs/FLUX.1-Kontext-dev",), "train_flux_kontext"
    ),
    "qwenimage": Family("tiny_qwen:qwenimage", ("Qwen/Qwen-Image",), "train_qwenimage"),
    "wan2_1": Family("tiny_wan:wan", ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",), "train_wan2_1"),
}


def adapter(name: str) -> type:
    """Return a family's adapter."""
    return registry.load(MODELS, name)


def family_of(model: str) -> str:
    """Return the family that a preset's `pretrained.model` belongs to."""
    (name,) = [name for name, family in FAMILIES.items() if model in family.hub_ids]
    return name
