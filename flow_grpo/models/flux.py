"""Adapt FLUX.1-dev (`FluxPipeline`): guidance is a number that the transformer is told.

Latents are kept unpacked, (16, h/8, w/8), and packed into tokens at the transformer's door, so
that a velocity knows height and width from x alone. Log-densities, being means over elements, are
those of packed latents.
"""

import copy
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.models.loading import (
    half_precision_dtype,
    load_pipeline,
    model_index,
    resolve_model,
)

MAX_T5_TOKENS = 512  # the stock pipeline takes no more
NO_FP16 = (
    "FLUX.1 was published in bf16, and some of its activations lie beyond fp16's largest number "
    "(65504), where diffusers clips them"
)
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
    """Latents (16, h/8, w/8), time 0..1, guidance as an embedding: always one forward a step."""

    pipeline_class = "FluxPipeline"
    family = "flux"
    block_class = "FluxTransformerBlock,FluxSingleTransformerBlock"
    lora_targets = (*ATTENTION, *FEED_FORWARD)
    negative = None
    no_fp16 = NO_FP16

    def __init__(self, pipeline, device: torch.device, *, max_sequence_length: int):
        """Wrap a loaded pipeline; `max_sequence_length` counts T5 tokens."""
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.dtype = pipeline.transformer.dtype
        self.max_sequence_length = checked_length(max_sequence_length)
        freeze(pipeline, self.device)

    @classmethod
    def load(cls, config, device: torch.device) -> "Flux":
        """Load from a folder or the hub: frozen parts in half if asked, the VAE in fp32."""
        pipeline = load(config, cls.pipeline_class)
        return cls(pipeline, device, max_sequence_length=config.sample.max_sequence_length)

    @property
    def transformer(self) -> nn.Module:
        return self.pipeline.transformer

    def check_size(self, size: tuple[int, int]) -> None:
        check_size(self.pipeline, size)

    def encode(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence | None = None,
        *,
        size: tuple[int, int],
        negative: str | None,
    ) -> Cond:
        """Encode prompts; `negative` has no use here."""
        assert images is None, "FLUX.1-dev takes no reference images"
        return encode_prompts(self.pipeline, prompts, self.max_sequence_length)

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return latent_shape(self.pipeline, size)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        return sigmas(self.pipeline, num_steps, size)

    def velocity(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, guidance_scale: float
    ) -> Tensor:
        """Return noise - data; `guidance_scale` has no effect on a model without its embedding."""
        packed = forward(
            self.pipeline,
            module,
            pack(x.to(self.dtype)),
            position_ids(x),
            sigma,
            cond,
            guidance_scale,
        )
        return unpack(packed, x)

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
        packed = self.pipeline(
            prompt=list(prompts),
            latents=pack(x.to(self.dtype)),
            height=size[0],
            width=size[1],
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            max_sequence_length=self.max_sequence_length,
            output_type="latent",
        ).images
        return unpack(packed.float(), x)

    def encode_images(self, images: Tensor) -> Tensor:
        return encode_images(self.pipeline.vae, images)

    def decode(self, x: Tensor) -> Tensor:
        return decode(self.pipeline.vae, x)

    def offload_text_encoders(self) -> None:
        offload_text_encoders(self.pipeline)


def load(config, pipeline_class: str):
    """Return a pipeline of FLUX.1's architecture.

    Raises:
        ValueError: another family's, in fp16, or guidance for a model that has no embedding of it.
    """
    from diffusers import FluxTransformer2DModel

    half = half_precision_dtype(config.mixed_precision, no_fp16=NO_FP16)
    checked_length(config.sample.max_sequence_length)
    path, revision = resolve_model(config.pretrained.model), config.pretrained.revision
    model_index(path, revision, expected=pipeline_class)
    try:
        settings = FluxTransformer2DModel.load_config(
            path, subfolder="transformer", revision=revision
        )
    except OSError as error:
        raise ValueError(f"cannot load {path}, a file is missing or broken: {error}") from error
    if not settings.get("guidance_embeds", False):
        for section in ("sample", "eval"):
            scale = config[section].guidance_scale
            if scale != 1:
                raise ValueError(
                    f"{section}.guidance_scale ({scale}) must be 1 for {path}, whose transformer "
                    "has no guidance embedding (guidance_embeds), so the scale would do nothing"
                )
    return load_pipeline(pipeline_class, path, config, half)


def freeze(pipeline, device: torch.device) -> None:
    """Put every part on `device`, in evaluation mode, without gradients."""
    pipeline.set_progress_bar_config(disable=True)
    for part in (pipeline.vae, pipeline.transformer, *text_encoders(pipeline)):
        part.requires_grad_(False)
        part.eval()
    pipeline.to(device)


def text_encoders(pipeline) -> tuple[nn.Module, ...]:
    """Return CLIP and T5."""
    return pipeline.text_encoder, pipeline.text_encoder_2


def offload_text_encoders(pipeline) -> None:
    """Move the text encoders to the CPU."""
    for encoder in text_encoders(pipeline):
        encoder.to("cpu")


def checked_length(length: int) -> int:
    """Return `length`, the T5 tokens, if the pipeline can pad a prompt to it."""
    if not 1 <= length <= MAX_T5_TOKENS:
        raise ValueError(
            f"sample.max_sequence_length ({length}) must be in [1, {MAX_T5_TOKENS}] for FLUX.1"
        )
    return length


def check_size(pipeline, size: tuple[int, int]) -> None:
    """Raise ValueError, naming the nearest valid size, for what no whole token covers."""
    unit = 2 * pipeline.vae_scale_factor
    for length in size:
        nearest = max(unit, round(length / unit) * unit)
        if length != nearest:
            raise ValueError(
                f"resolution ({length}) must be a multiple of {unit} for this model; "
                f"nearest valid: {nearest}"
            )


def latent_shape(pipeline, size: tuple[int, int]) -> tuple[int, int, int]:
    """Return (channels, height, width); four neighbouring latents are one token."""
    factor = pipeline.vae_scale_factor
    return (pipeline.transformer.config.in_channels // 4, size[0] // factor, size[1] // factor)


def sigmas(pipeline, num_steps: int, size: tuple[int, int]) -> Tensor:
    """Return the sigmas (num_steps + 1,) that the pipeline's own functions make for `size`.

    Tokens of reference images do not count in the shift.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    scheduler = copy.deepcopy(pipeline.scheduler)
    settings = scheduler.config
    linear = np.linspace(1.0, 1 / num_steps, num_steps)
    _, height, width = latent_shape(pipeline, size)
    mu = calculate_shift(
        (height // 2) * (width // 2),
        settings.get("base_image_seq_len", 256),
        settings.get("max_image_seq_len", 4096),
        settings.get("base_shift", 0.5),
        settings.get("max_shift", 1.15),
    )
    given = None if settings.get("use_flow_sigmas", False) else linear
    retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=given, mu=mu)
    return scheduler.sigmas.to(torch.float32).cpu()


def encode_prompts(pipeline, prompts: Sequence[str], length: int) -> Cond:
    """Encode prompts, one a forward: T5's tokens, padded to `length`, and CLIP's summary."""
    encoded = [
        pipeline.encode_prompt(
            prompt, None, device=pipeline.text_encoder.device, max_sequence_length=length
        )[:2]
        for prompt in prompts
    ]
    embeds, pooled = map(torch.cat, zip(*encoded))
    return Cond({"prompt_embeds": embeds, "pooled_prompt_embeds": pooled})


def pack(x: Tensor) -> Tensor:
    """Make tokens (b, h/2 * w/2, 4c) of latents (b, c, h, w): each is a square of 2 x 2."""
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(b, (h // 2) * (w // 2), 4 * c)


def unpack(tokens: Tensor, like: Tensor) -> Tensor:
    """Undo `pack`: return latents of the shape of `like`."""
    b, c, h, w = like.shape
    return tokens.reshape(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(like.shape)


def position_ids(x: Tensor, image: int = 0) -> Tensor:
    """Return (tokens, 3): `image` (0: the one to make), row and column of every token of x."""
    rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
    ids = torch.full((rows, columns, 3), float(image), device=x.device)
    ids[..., 1] = torch.arange(rows, device=x.device)[:, None]
    ids[..., 2] = torch.arange(columns, device=x.device)
    return ids.reshape(-1, 3)


def forward(
    pipeline,
    module: nn.Module,
    tokens: Tensor,
    ids: Tensor,
    sigma: Tensor,
    cond: Cond,
    guidance_scale: float,
) -> Tensor:
    """Run the transformer; return its output tokens in float32.

    Time goes in as sigma in float32. The transformer rounds it to its own dtype, once; the stock
    pipeline rounds 1000 sigma first as well, which in bf16 may give a neighbouring time.
    """
    embeds = cond["prompt_embeds"].to(tokens.dtype)
    guidance = None
    if pipeline.transformer.config.guidance_embeds:
        guidance = torch.full_like(sigma, guidance_scale)
    return module(
        hidden_states=tokens,
        timestep=sigma,
        guidance=guidance,
        pooled_projections=cond["pooled_prompt_embeds"].to(tokens.dtype),
        encoder_hidden_states=embeds,
        txt_ids=ids.new_zeros(embeds.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0].float()


def encode_images(vae: nn.Module, images: Tensor) -> Tensor:
    """Return x_0 (b, c, h/8, w/8), the mode, of images (b, 3, h, w) in [0, 1]."""
    x = vae.encode((images * 2 - 1).to(vae.dtype)).latent_dist.mode()
    return ((x - vae.config.shift_factor) * vae.config.scaling_factor).float()


def decode(vae: nn.Module, x: Tensor) -> Tensor:
    """Return images (b, 3, h, w) in [0, 1], float32, of x_0."""
    x = x.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return (vae.decode(x, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)
