"""Adapt Wan 2.1 text-to-video (`WanPipeline`)."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models.autoencoders import decode_standardised, encode_standardised
from flow_grpo.models.base import FlowModel
from flow_grpo.models.schedulers import scheduler_sigmas

FRAMES_OF_A_LATENT = 4  # of every published autoencoder; a loaded one's own is checked again


@final
class Wan21(FlowModel):
    """Latents (16, frames, h/8, w/8), time 0..1000, classifier-free guidance in one batch.

    The published pipelines come with UniPC, a multistep solver that no SDE can take the place of a
    step of. The adapter replaces it, in the pipeline too, by `FlowMatchEulerDiscreteScheduler` of
    the same flow shift.
    """

    pipeline_class = "WanPipeline"
    family = "wan2.1"
    block_class = "WanTransformerBlock"
    no_fp16 = "Wan was published in bf16 and overflows fp16"
    task = "text-to-video"
    output = "frames"
    lora_targets = (
        "add_k_proj",
        "add_q_proj",
        "add_v_proj",
        "to_add_out",
        "to_k",
        "to_out.0",
        "to_q",
        "to_v",
    )

    def __init__(
        self, pipeline, device: torch.device, *, max_sequence_length: int, num_frames: int
    ):
        """Wrap a loaded pipeline, for clips of `num_frames` frames."""
        super().__init__(pipeline, device, max_sequence_length=max_sequence_length)
        self.num_frames = _checked_frames(num_frames, pipeline.vae_scale_factor_temporal)
        pipeline.scheduler = _euler(pipeline.scheduler)

    @classmethod
    def check_config(cls, config) -> None:
        super().check_config(config)
        _checked_frames(config.num_frames, FRAMES_OF_A_LATENT)

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Refuse Wan 2.2, which has the same pipeline class."""
        if index.get("transformer_2", [None])[0] is not None or index.get("expand_timesteps"):
            raise ValueError(
                f"{path} is a Wan 2.2 pipeline (two transformers, or a time per token); this "
                "family is Wan 2.1 text-to-video, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
            )
        return {}

    @classmethod
    def own_settings(cls, config) -> dict:
        return {"num_frames": config.num_frames}

    @property
    def size_unit(self) -> int:
        return self.pipeline.vae_scale_factor_spatial * self.transformer.config.patch_size[1]

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.pipeline.text_encoder.device,
        )
        return {"prompt_embeds": embeds}

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        space = self.pipeline.vae_scale_factor_spatial
        frames = (self.num_frames - 1) // self.pipeline.vae_scale_factor_temporal + 1
        return (self.transformer.config.in_channels, frames, size[0] // space, size[1] // space)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        return scheduler_sigmas(self.pipeline.scheduler, num_steps, num_tokens=0, linear=False)

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
            return_dict=False,
        )[0].float()

    def encode_images(self, images: Tensor) -> Tensor:
        return encode_standardised(self.pipeline.vae, images)

    def decode(self, x: Tensor) -> Tensor:
        return decode_standardised(self.pipeline.vae, x)

    def stock_settings(self, guidance_scale: float) -> dict:
        return {"guidance_scale": guidance_scale, "num_frames": self.num_frames}

    def stock_setup(self) -> str:
        shift = self.pipeline.scheduler.config.shift
        return (
            "from diffusers import FlowMatchEulerDiscreteScheduler\n\n"
            f"pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift={shift})\n"
        )


def _euler(scheduler):
    """Return the Euler scheduler with the flow shift of `scheduler`, itself if it is one."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return scheduler
    return FlowMatchEulerDiscreteScheduler(
        shift=scheduler.config.flow_shift,
        num_train_timesteps=scheduler.config.num_train_timesteps,
    )


def _checked_frames(num_frames: int, unit: int) -> int:
    nearest = max(0, round((num_frames - 1) / unit)) * unit + 1
    if num_frames != nearest:
        raise ValueError(
            f"num_frames ({num_frames}) must be one more than a multiple of {unit}; "
            f"nearest valid: {nearest}"
        )
    return num_frames
