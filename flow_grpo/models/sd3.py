"""Adapt Stable Diffusion 3 and 3.5 (`StableDiffusion3Pipeline`), with or without T5."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models.autoencoders import decode_shifted, encode_shifted
from flow_grpo.models.base import FlowModel
from flow_grpo.models.schedulers import scheduler_sigmas


@final
class SD3(FlowModel):
    """Latents (16, h/8, w/8), time 0..1000, classifier-free guidance in one batch."""

    pipeline_class = "StableDiffusion3Pipeline"
    family = "sd3"
    block_class = "JointTransformerBlock"
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    min_tokens = 0  # without T5
    lora_targets = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )

    def __init__(self, pipeline, device: torch.device, *, max_sequence_length: int):
        """Wrap a loaded pipeline; `max_sequence_length` counts T5 tokens (0: none)."""
        if max_sequence_length == 0 and pipeline.text_encoder_3 is not None:
            raise ValueError(
                f"sample.max_sequence_length (0) must be in [1, {self.max_tokens}] for a pipeline "
                "with T5; 0 works without T5 only (pretrained.use_t5=False)"
            )
        super().__init__(pipeline, device, max_sequence_length=max_sequence_length)

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Leave T5 out if the pipeline has none, or no tokens are asked of it."""
        has_t5 = index.get("text_encoder_3", [None])[0] is not None
        if has_t5 and config.pretrained.use_t5 and config.sample.max_sequence_length != 0:
            return {}
        return {"text_encoder_3": None, "tokenizer_3": None}

    @property
    def size_unit(self) -> int:
        return self.pipeline.vae_scale_factor * self.transformer.config.patch_size

    @property
    def largest_size(self) -> int:
        return self.transformer.config.pos_embed_max_size * self.size_unit

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            text,
            None,
            None,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return (self.transformer.config.in_channels, size[0] // factor, size[1] // factor)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        num_tokens = (size[0] // self.size_unit) * (size[1] // self.size_unit)
        return scheduler_sigmas(
            self.pipeline.scheduler, num_steps, num_tokens=num_tokens, linear=False, max_shift=1.16
        )

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        return module(
            hidden_states=x.to(self.dtype),
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=cond["prompt_embeds"].to(self.dtype),
            pooled_projections=cond["pooled_prompt_embeds"].to(self.dtype),
            return_dict=False,
        )[0].float()

    def encode_images(self, images: Tensor) -> Tensor:
        return encode_shifted(self.pipeline.vae, images)

    def decode(self, x: Tensor) -> Tensor:
        return decode_shifted(self.pipeline.vae, x)
