"""Adapt FLUX.1-dev (`FluxPipeline`): guidance is a number that the transformer is told."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models.autoencoders import decode_shifted, encode_shifted
from flow_grpo.models.base import FlowModel
from flow_grpo.models.loading import transformer_config
from flow_grpo.models.schedulers import scheduler_sigmas
from flow_grpo.models.tokens import PATCH, pack, unpack

ATTENTION = (
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "attn.to_k",
    "attn.to_out.0",
    "attn.to_q",
    "attn.to_v",
)
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


@final
class Flux(FlowModel):
    """Token grid (h/16, w/16, 64), time 0..1, guidance as an embedding: one forward a step."""

    pipeline_class = "FluxPipeline"
    family = "flux"
    block_class = "FluxTransformerBlock,FluxSingleTransformerBlock"
    text_encoders = ("text_encoder", "text_encoder_2")
    lora_targets = (*ATTENTION, *FEED_FORWARD)
    negative = None
    mixed_gradients = True  # single blocks join attention and feed-forward before they project
    no_fp16 = (
        "FLUX.1 was published in bf16, and some of its activations lie beyond fp16's largest "
        "number (65504), where diffusers clips them"
    )

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Refuse guidance for a transformer that has no embedding of it."""
        check_guidance(path, index, config)
        return {}

    @property
    def size_unit(self) -> int:
        return PATCH * self.pipeline.vae_scale_factor

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return T5's tokens, padded, and CLIP's summary."""
        embeds, pooled, _ = self.pipeline.encode_prompt(
            text,
            None,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

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
        tokens = x.flatten(1, 2).to(self.dtype)
        velocity = run(
            module, self.transformer, tokens, position_ids(x), sigma, cond, guidance_scale
        )
        return velocity.unflatten(1, x.shape[1:3])

    def stock_latents(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def encode_images(self, images: Tensor) -> Tensor:
        return pack(encode_shifted(self.pipeline.vae, images))

    def decode(self, x: Tensor) -> Tensor:
        return decode_shifted(self.pipeline.vae, unpack(x))


def check_guidance(path: str, index: dict, config) -> None:
    """Raise ValueError if a guidance scale other than 1 would do nothing."""
    if transformer_config(path, index, config).get("guidance_embeds", False):
        return
    for section in ("sample", "eval"):
        scale = config[section].guidance_scale
        if scale != 1:
            raise ValueError(
                f"{section}.guidance_scale ({scale}) must be 1 for {path}, whose transformer "
                "has no guidance embedding (guidance_embeds), so the scale would do nothing"
            )


def position_ids(grid: Tensor, image: int = 0) -> Tensor:
    """Return (h * w, 3) for a grid (b, h, w, c): `image` (0: the one to make), row, column."""
    rows, columns = grid.shape[1:3]
    ids = torch.full((rows, columns, 3), float(image), device=grid.device)
    ids[..., 1] = torch.arange(rows, device=grid.device)[:, None]
    ids[..., 2] = torch.arange(columns, device=grid.device)
    return ids.flatten(0, 1)


def run(
    module: nn.Module,
    transformer: nn.Module,
    tokens: Tensor,
    ids: Tensor,
    sigma: Tensor,
    cond: dict[str, Tensor],
    guidance_scale: float,
) -> Tensor:
    """Run `module`, which may wrap `transformer`; return its output tokens in float32.

    Time goes in as sigma in float32. The transformer rounds it to its own dtype, once; the stock
    pipeline rounds 1000 sigma first as well, which in bf16 may give a neighbouring time.
    """
    told = transformer.config.guidance_embeds
    embeds = cond["prompt_embeds"].to(tokens.dtype)
    return module(
        hidden_states=tokens,
        timestep=sigma,
        guidance=torch.full_like(sigma, guidance_scale) if told else None,
        pooled_projections=cond["pooled_prompt_embeds"].to(tokens.dtype),
        encoder_hidden_states=embeds,
        txt_ids=ids.new_zeros(embeds.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0].float()
