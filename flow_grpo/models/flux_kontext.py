"""Adapt FLUX.1-Kontext-dev (`FluxKontextPipeline`): tokens of an image to edit join the sequence.

The reference image is resized to the size of the one to make, whatever its shape, so that all
samples of a run have the same number of tokens; stock calls have `_auto_resize=False` for that.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models import flux
from flow_grpo.models.base import Cond, FlowModel


@final
class FluxKontext(FlowModel):
    """As `flux.Flux`, with as many tokens again that the velocity is not asked for."""

    pipeline_class = "FluxKontextPipeline"
    family = "flux"
    block_class = flux.Flux.block_class
    lora_targets = (*flux.Flux.lora_targets, "proj_mlp")
    negative = None
    no_fp16 = flux.NO_FP16
    takes_images = True

    def __init__(self, pipeline, device: torch.device, *, max_sequence_length: int):
        """Wrap a loaded pipeline; `max_sequence_length` counts T5 tokens."""
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.dtype = pipeline.transformer.dtype
        self.max_sequence_length = flux.checked_length(max_sequence_length)
        flux.freeze(pipeline, self.device)

    @classmethod
    def load(cls, config, device: torch.device) -> "FluxKontext":
        """Load from a folder or the hub: frozen parts in half if asked, the VAE in fp32."""
        pipeline = flux.load(config, cls.pipeline_class)
        return cls(pipeline, device, max_sequence_length=config.sample.max_sequence_length)

    @property
    def transformer(self) -> nn.Module:
        return self.pipeline.transformer

    def check_size(self, size: tuple[int, int]) -> None:
        flux.check_size(self.pipeline, size)

    def encode(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence | None = None,
        *,
        size: tuple[int, int],
        negative: str | None,
    ) -> Cond:
        """Encode prompts and the images they are about; `negative` has no use here."""
        assert images is not None, "FLUX.1-Kontext edits an image: every prompt needs one"
        assert len(images) == len(prompts)
        cond = flux.encode_prompts(self.pipeline, prompts, self.max_sequence_length)
        references = torch.cat([self._encode_reference(image, size) for image in images])
        return Cond({**cond.tensors, "reference_latents": references})

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return flux.latent_shape(self.pipeline, size)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        return flux.sigmas(self.pipeline, num_steps, size)

    def velocity(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, guidance_scale: float
    ) -> Tensor:
        reference = cond["reference_latents"]
        tokens = flux.pack(x.to(self.dtype))
        packed = flux.forward(
            self.pipeline,
            module,
            torch.cat([tokens, flux.pack(reference.to(self.dtype))], dim=1),
            torch.cat([flux.position_ids(x), flux.position_ids(reference, image=1)]),
            sigma,
            cond,
            guidance_scale,
        )
        return flux.unpack(packed[:, : tokens.shape[1]], x)

    def stock(
        self,
        prompts: Sequence[str],
        x: Tensor,
        images: Sequence | None = None,
        *,
        size: tuple[int, int],
        num_steps: int,
        guidance_scale: float,
    ) -> Tensor:
        references = torch.cat([self._encode_reference(image, size) for image in images])
        packed = self.pipeline(
            image=references,  # latents: the pipeline takes them as they are
            max_area=size[0] * size[1],
            _auto_resize=False,
            prompt=list(prompts),
            latents=flux.pack(x.to(self.dtype)),
            height=size[0],
            width=size[1],
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            max_sequence_length=self.max_sequence_length,
            output_type="latent",
        ).images
        return flux.unpack(packed.float(), x)

    def encode_images(self, images: Tensor) -> Tensor:
        return flux.encode_images(self.pipeline.vae, images)

    def decode(self, x: Tensor) -> Tensor:
        return flux.decode(self.pipeline.vae, x)

    def offload_text_encoders(self) -> None:
        flux.offload_text_encoders(self.pipeline)

    def _encode_reference(self, image, size: tuple[int, int]) -> Tensor:
        """Return latents (1, c, h/8, w/8) of a PIL image, in the transformer's dtype."""
        pixels = self.pipeline.image_processor.preprocess(image, *size).to(self.device)
        return flux.encode_images(self.pipeline.vae, pixels / 2 + 0.5).to(self.dtype)
