"""Adapt Stable Diffusion 3 and 3.5 (`StableDiffusion3Pipeline`), with or without T5."""

import copy
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.guidance import classifier_free
from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.models.loading import (
    half_precision_dtype,
    load_pipeline,
    model_index,
    resolve_model,
)

CONDITIONS = ("prompt_embeds", "pooled_prompt_embeds")
MAX_T5_TOKENS = 512  # the stock pipeline takes no more


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
        self.max_sequence_length = _checked_length(pipeline, max_sequence_length)
        self._negative: tuple[str, tuple[Tensor, Tensor]] | None = None
        pipeline.set_progress_bar_config(disable=True)
        for part in (pipeline.vae, pipeline.transformer, *_text_encoders(pipeline)):
            part.requires_grad_(False)
            part.eval()
        pipeline.to(self.device)

    @classmethod
    def load(cls, config, device: torch.device) -> "SD3":
        """Load from a folder or the hub: frozen parts in half if asked, the VAE in fp32."""
        path = resolve_model(config.pretrained.model)
        index = model_index(path, config.pretrained.revision, expected=cls.pipeline_class)
        has_t5 = index.get("text_encoder_3", [None])[0] is not None
        with_t5 = has_t5 and config.pretrained.use_t5 and config.sample.max_sequence_length != 0
        half = half_precision_dtype(config.mixed_precision)
        absent = {} if with_t5 else {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = load_pipeline(cls.pipeline_class, path, config, half, **absent)
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
        encoded = [self._encode_one(prompt) for prompt in prompts]
        tensors = dict(zip(CONDITIONS, map(torch.cat, zip(*encoded))))
        if negative is not None:
            if self._negative is None or self._negative[0] != negative:
                self._negative = negative, self._encode_one(negative)
            for name, tensor in zip(CONDITIONS, self._negative[1]):
                tensors[f"negative_{name}"] = torch.cat([tensor] * len(prompts))
        return Cond(tensors)

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


def _checked_length(pipeline, length: int) -> int:
    """Return `length`, the T5 tokens, if the pipeline can pad a prompt to it."""
    shortest = 0 if pipeline.text_encoder_3 is None else 1
    if not shortest <= length <= MAX_T5_TOKENS:
        hint = "; 0 works without T5 only (pretrained.use_t5=False)" if length == 0 else ""
        raise ValueError(
            f"sample.max_sequence_length ({length}) must be in [{shortest}, {MAX_T5_TOKENS}]{hint}"
        )
    return length
