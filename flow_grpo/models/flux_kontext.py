"""Adapt FLUX.1-Kontext-dev (`FluxKontextPipeline`): tokens of an image to edit join the sequence.

The reference image is resized to the size of the one to make, whatever its shape, so that all
samples of a run have the same number of tokens; stock calls have `_auto_resize=False` for that.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models import flux
from flow_grpo.models.base import FlowModel
from flow_grpo.models.flux import Flux
from flow_grpo.models.tokens import unpack


@final
class FluxKontext(FlowModel):
    """As `flux.Flux`, with as many tokens again that the velocity is not asked for."""

    pipeline_class = "FluxKontextPipeline"
    family = "flux"
    block_class = Flux.block_class
    text_encoders = Flux.text_encoders
    lora_targets = (*Flux.lora_targets, "proj_mlp")
    negative = None
    mixed_gradients = Flux.mixed_gradients
    no_fp16 = Flux.no_fp16
    max_images = 1
    task = "image-to-image"

    size_unit = Flux.size_unit
    latent_shape = Flux.latent_shape
    sigmas = Flux.sigmas
    stock_latents = Flux.stock_latents
    encode_text = Flux.encode_text
    encode_images = Flux.encode_images
    decode = Flux.decode

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Refuse guidance for a transformer that has no embedding of it."""
        flux.check_guidance(path, index, config)
        return {}

    def encode_references(self, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return latents (1, h/16, w/16, 64) of the image, in the transformer's dtype."""
        pixels = self.pipeline.image_processor.preprocess(images[0], *size).to(self.device)
        return {"reference": self.encode_images(pixels / 2 + 0.5).to(self.dtype)}

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        reference = cond["reference"].to(self.dtype)
        tokens = x.flatten(1, 2).to(self.dtype)
        velocity = flux.run(
            module,
            self.transformer,
            torch.cat([tokens, reference.flatten(1, 2)], dim=1),
            torch.cat([flux.position_ids(x), flux.position_ids(reference, image=1)]),
            sigma,
            cond,
            guidance_scale,
        )
        return velocity[:, : tokens.shape[1]].unflatten(1, x.shape[1:3])

    def stock_references(self, images: Sequence[Sequence], size: tuple[int, int]) -> dict:
        """Return latents, which the pipeline takes as they are: bf16 pixels fail in an fp32 VAE."""
        references = [self.encode_references(own, size)["reference"] for own in images]
        return {
            "image": unpack(torch.cat(references)),
            "max_area": size[0] * size[1],
            "_auto_resize": False,
        }

    def stock_reference_code(self, size: tuple[int, int]) -> str:
        height, width = size
        return (
            f'image=PIL.Image.open("IMAGE").convert("RGB")\n'
            f"    .resize(({width}, {height}), PIL.Image.Resampling.LANCZOS),\n"
            f"    max_area={height} * {width}, _auto_resize=False,"
        )
