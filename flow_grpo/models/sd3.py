"""Adapt Stable Diffusion 3 and 3.5 (`StableDiffusion3Pipeline`), with or without T5."""

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.guidance import classifier_free
from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.models.loading import model_index, half_precision_dtype, resolve_model


@final
class SD3(FlowModel):
    """Latents (16, h/8, w/8), time 0..1000, classifier-free guidance in one batch."""

    pipeline_class = "StableDiffusion3Pipeline"
    family = "sd3"
    block_class = "JointTransformerBlock"
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
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.dtype = pipeline.transformer.dtype
        self.max_sequence_length = max_sequence_length
        pipeline.set_progress_bar_config(disable=True)
        for part in (pipeline.vae, pipeline.transformer, *_text_encoders(pipeline)):
            part.requires_grad_(False)
            part.eval()
        pipeline.to(self.device)

    @classmethod
    def load(cls, config, device: torch.device) -> "SD3":
        """Load from a folder or the hub: frozen parts in half if asked, the VAE in fp32."""
        from diffusers import StableDiffusion3Pipeline

        path = resolve_model(config.pretrained.model)
        index = model_index(path, config.pretrained.revision, expected=cls.pipeline_class)
        without_t5 = not config.pretrained.use_t5 or index["text_encoder_3"][0] is None
        absent = {"text_encoder_3": None, "tokenizer_3": None} if without_t5 else {}
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            path, revision=config.pretrained.revision, **absent
        )
        half = half_precision_dtype(config.mixed_precision)
        pipeline.vae.to(torch.float32)
        pipeline.transformer.to(half if config.use_lora else torch.float32)
        for encoder in _text_encoders(pipeline):
            encoder.to(half)
        return cls(pipeline, device, max_sequence_length=config.sample.max_sequence_length)

    @property
    def transformer(self) -> nn.Module:
        return self.pipeline.transformer

    def check_size(self, size: tuple[int, int]) -> None:
        unit = self.pipeline.vae_scale_factor * self.transformer.config.patch_size
        largest = self.transformer.config.pos_embed_max_size * unit
        for length in size:
            nearest = min(max(unit, round(length / unit) * unit), largest)
            if length != nearest:
                raise ValueError(
                    f"resolution ({length}) must be a multiple of {unit}, at most {largest}, "
                    f"for this model; nearest valid: {nearest}"
                )

    def encode(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence | None = None,
        *,
        size: tuple[int, int],
        negative: str | None,
    ) -> Cond:
        assert images is None, "SD3 takes no reference images"
        tensors: dict[str, list[Tensor]] = {}
        for prompt in prompts:
            branches = {"": prompt} if negative is None else {"": prompt, "negative_": negative}
            for prefix, text in branches.items():
                embeds, pooled = self._encode_one(text)
                tensors.setdefault(f"{prefix}prompt_embeds", []).append(embeds)
                tensors.setdefault(f"{prefix}pooled_prompt_embeds", []).append(pooled)
        return Cond({name: torch.cat(parts) for name, parts in tensors.items()})

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return (self.transformer.config.in_channels, size[0] // factor, size[1] // factor)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(num_steps, device="cpu", **self._shift(scheduler, size))
        return scheduler.sigmas.to(torch.float32).cpu()

    def velocity(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, guidance_scale: float
    ) -> Tensor:
        embeds, pooled = cond["prompt_embeds"], cond["pooled_prompt_embeds"]
        guided = guidance_scale > 1.0
        if guided:
            x, sigma = torch.cat([x, x]), torch.cat([sigma, sigma])
            embeds = torch.cat([cond["negative_prompt_embeds"], embeds])
            pooled = torch.cat([cond["negative_pooled_prompt_embeds"], pooled])
        velocity = module(
            hidden_states=x.to(self.dtype),
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=embeds.to(self.dtype),
            pooled_projections=pooled.to(self.dtype),
            return_dict=False,
        )[0].float()
        return classifier_free(*velocity.chunk(2), guidance_scale) if guided else velocity

    def encode_images(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        x = vae.encode((images * 2 - 1).to(vae.dtype)).latent_dist.mode()
        return ((x - vae.config.shift_factor) * vae.config.scaling_factor).float()

    def decode(self, x: Tensor) -> Tensor:
        vae = self.pipeline.vae
        x = x.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(x, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)

    def offload_text_encoders(self) -> None:
        for encoder in _text_encoders(self.pipeline):
            encoder.to("cpu")

    def _encode_one(self, text: str) -> tuple[Tensor, Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            text,
            None,
            None,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return embeds, pooled

    def _shift(self, scheduler, size: tuple[int, int]) -> dict[str, float]:
        """Return the resolution-dependent shift as the pipeline computes it, if it has one."""
        if not scheduler.config.get("use_dynamic_shifting", None):
            return {}
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
            calculate_shift,
        )

        _, height, width = self.latent_shape(size)
        patch = self.transformer.config.patch_size
        mu = calculate_shift(
            (height // patch) * (width // patch),
            scheduler.config.get("base_image_seq_len", 256),
            scheduler.config.get("max_image_seq_len", 4096),
            scheduler.config.get("base_shift", 0.5),
            scheduler.config.get("max_shift", 1.16),
        )
        return {"mu": mu}


def _text_encoders(pipeline) -> list[nn.Module]:
    """Return the text encoders that the pipeline has; the third may be absent."""
    parts = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)
    return [part for part in parts if part is not None]
