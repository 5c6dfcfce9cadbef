"""Adapt Qwen-Image (`QwenImagePipeline`)."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.guidance import norm_preserving
from flow_grpo.models.autoencoders import decode_standardised, encode_standardised
from flow_grpo.models.base import FlowModel
from flow_grpo.models.schedulers import scheduler_sigmas
from flow_grpo.models.tokens import PATCH, pack, unpack


@final
class QwenImage(FlowModel):
    """Token grid (h/16, w/16, 64), time 0..1, true guidance in one batch."""

    pipeline_class = "QwenImagePipeline"
    family = "qwen-image"
    block_class = "QwenImageTransformerBlock"
    max_tokens = 1024
    negative = " "  # the pipeline does no guidance at all without a negative
    guide = staticmethod(norm_preserving)
    no_fp16 = "Qwen-Image was published in bf16 and overflows fp16"
    lora_targets = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )

    @property
    def size_unit(self) -> int:
        return PATCH * self.pipeline.vae_scale_factor

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        embeds, mask = self.pipeline.encode_prompt(
            text,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.max_sequence_length,
        )
        assert mask is None, "one prompt by itself has no padding"
        return padded(embeds, self.max_sequence_length)

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return (*(n // self.size_unit for n in size), self.transformer.config.in_channels)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        height, width, _ = self.latent_shape(size)
        return scheduler_sigmas(
            self.pipeline.scheduler, num_steps, num_tokens=height * width, linear=True
        )

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        grid = x.shape[1:3]
        tokens = x.flatten(1, 2).to(self.dtype)
        return run(module, tokens, [(1, *grid)], sigma, cond).unflatten(1, grid)

    def stock_settings(self, guidance_scale: float) -> dict:
        return stock_settings(self.negative, guidance_scale)

    def stock_latents(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def encode_images(self, images: Tensor) -> Tensor:
        return encode_images(self.pipeline.vae, images)

    def decode(self, x: Tensor) -> Tensor:
        return decode(self.pipeline.vae, x)


def padded(embeds: Tensor, length: int) -> dict[str, Tensor]:
    """Return embeddings (1, n, d) with zeros up to `length` tokens, and where they are (1, n)."""
    num_tokens = embeds.shape[1]
    places = torch.arange(length, device=embeds.device)
    return {
        "prompt_embeds": nn.functional.pad(embeds, (0, 0, 0, length - num_tokens)),
        "prompt_mask": places[None] < num_tokens,
    }


def run(
    module: nn.Module,
    tokens: Tensor,
    grids: list[tuple[int, int, int]],
    sigma: Tensor,
    cond: dict[str, Tensor],
) -> Tensor:
    """Run the transformer; return its output tokens in float32.

    Args:
        module: the transformer, perhaps wrapped.
        tokens: (b, n, 64), of the image to make, then of reference images.
        grids: (frames, height, width) of each of these images.
        sigma: (b,); the transformer rounds it to its own dtype, once.
        cond: what `padded` returns.
    """
    return module(
        hidden_states=tokens,
        timestep=sigma * 1000 / 1000,  # as the pipeline's, whose float32 has this rounding
        encoder_hidden_states=cond["prompt_embeds"].to(tokens.dtype),
        encoder_hidden_states_mask=cond["prompt_mask"],
        img_shapes=[grids] * len(tokens),
        return_dict=False,
    )[0].float()


def stock_settings(negative: str, guidance_scale: float) -> dict:
    """Return the arguments of the pipeline's call that are Qwen-Image's own."""
    unguided = {"negative_prompt": negative} if guidance_scale > 1 else {}
    return {"true_cfg_scale": guidance_scale, **unguided}


def encode_images(vae: nn.Module, images: Tensor) -> Tensor:
    """Return the token grid of images (b, 3, h, w) in [0, 1], as clips of one frame."""
    return pack(encode_standardised(vae, images.unsqueeze(1)).squeeze(2))


def decode(vae: nn.Module, grid: Tensor) -> Tensor:
    """Return images (b, 3, h, w) in [0, 1], float32, of a token grid."""
    return decode_standardised(vae, unpack(grid).unsqueeze(2))[:, 0]
