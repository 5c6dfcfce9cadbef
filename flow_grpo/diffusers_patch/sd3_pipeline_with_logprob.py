"""Offer `pipeline_with_logprob`: Stable Diffusion 3 sampling that keeps latents and log-probs.

One signature serves the two functions of this name in yifan123/flow_grpo:

- sde_window_size None (base): every step is stochastic, the last one too. Returns image,
  all_latents (T + 1), all_log_probs (T), and all_prev_latents_mean (T) if asked for.
- sde_window_size 0 (all steps but the last) or more (fast): noise inside the window only, whose
  start is drawn from torch's global generator. Returns image, all_latents (size + 1),
  all_log_probs (size), all_timesteps (size).

Lists hold one tensor a step, (b, *latent) or (b,). Noise comes from torch's global generator and
initial latents from `generator`, as there. Latents stay float32 between the steps.
"""

from collections.abc import Callable

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    calculate_shift,
    retrieve_timesteps,
)
from torch import Tensor

from flow_grpo.diffusers_patch.sd3_sde_with_logprob import sde_step_with_logprob
from flow_grpo.guidance import classifier_free
from flow_grpo.schedules import sde_window


@torch.no_grad()
def pipeline_with_logprob(
    pipeline,
    prompt: str | list[str] | None = None,
    prompt_2: str | list[str] | None = None,
    prompt_3: str | list[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int = 28,
    sigmas: list[float] | None = None,
    guidance_scale: float = 7.0,
    negative_prompt: str | list[str] | None = None,
    negative_prompt_2: str | list[str] | None = None,
    negative_prompt_3: str | list[str] | None = None,
    num_images_per_prompt: int = 1,
    generator: torch.Generator | list[torch.Generator] | None = None,
    latents: Tensor | None = None,
    prompt_embeds: Tensor | None = None,
    negative_prompt_embeds: Tensor | None = None,
    pooled_prompt_embeds: Tensor | None = None,
    negative_pooled_prompt_embeds: Tensor | None = None,
    output_type: str = "pil",
    joint_attention_kwargs: dict | None = None,
    clip_skip: int | None = None,
    max_sequence_length: int = 256,
    noise_level: float = 0.7,
    return_prev_sample_mean: bool = False,
    sde_window_size: int | None = None,
    sde_window_range: tuple[int, int] = (0, 5),
    sde_type: str = "sde",
) -> tuple:
    """Sample like the stock pipeline, with noise; return image, latents, log-probs and more.

    Which more, and where the noise goes, depends on sde_window_size: see the module.
    """
    device, guided = pipeline._execution_device, guidance_scale > 1
    negatives = (negative_prompt, negative_prompt_2, negative_prompt_3)
    given = (prompt_embeds, negative_prompt_embeds)
    given += (pooled_prompt_embeds, negative_pooled_prompt_embeds)
    encoded = pipeline.encode_prompt(
        *(prompt, prompt_2, prompt_3, device, num_images_per_prompt, guided),
        *(*negatives, *given, clip_skip, max_sequence_length),
    )
    pixels = pipeline.default_sample_size * pipeline.vae_scale_factor
    channels = pipeline.transformer.config.in_channels
    size = (len(encoded[0]), channels, height or pixels, width or pixels)
    x = pipeline.prepare_latents(*size, torch.float32, device, generator, latents)
    velocity = _velocity(pipeline, encoded, guidance_scale, joint_attention_kwargs)
    timesteps = _timesteps(pipeline, num_inference_steps, sigmas, x)
    window = tuple(range(len(timesteps)))
    if sde_window_size is not None:
        drawn = {"generator": torch.default_generator}
        window = sde_window(len(timesteps), sde_window_size, sde_window_range, **drawn)
    x, *kept, means = _run(
        pipeline.scheduler, velocity, x, timesteps, window, noise_level, sde_type
    )
    kept = (_image(pipeline, x, output_type), *kept)
    if sde_window_size is not None:
        return *kept, [timesteps[i].expand(len(x)) for i in window]
    return (*kept, means) if return_prev_sample_mean else kept


def _velocity(pipeline, encoded, guidance_scale: float, joint_attention_kwargs) -> Callable:
    """Return velocity(x, timestep), guided in one batch of negative and prompt."""
    embeds, negative, pooled, negative_pooled = encoded
    guided = guidance_scale > 1
    if guided:
        embeds, pooled = torch.cat([negative, embeds]), torch.cat([negative_pooled, pooled])

    def velocity(x: Tensor, timestep: Tensor) -> Tensor:
        copies = torch.cat([x, x]) if guided else x
        output = pipeline.transformer(
            hidden_states=copies.to(embeds.dtype),
            timestep=timestep.expand(len(copies)),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            joint_attention_kwargs=joint_attention_kwargs,
            return_dict=False,
        )[0].float()
        return classifier_free(*output.chunk(2), guidance_scale) if guided else output

    return velocity


def _run(scheduler, velocity, x, timesteps, window, noise_level, sde_type) -> tuple:
    """Return x_0 and, of the window's steps, latents (one more), log-probs and means."""
    latents, log_probs, means = [], [], []
    for i, timestep in enumerate(timesteps):
        level = noise_level if i in window else 0.0
        x_next, log_prob, mean, _ = sde_step_with_logprob(
            scheduler, velocity(x, timestep), timestep, x, level, sde_type=sde_type
        )
        if i in window:
            latents = latents or [x]
            latents.append(x_next)
            log_probs.append(log_prob)
            means.append(mean)
        x = x_next
    return x, latents, log_probs, means


def _timesteps(pipeline, num_steps: int, sigmas: list[float] | None, x: Tensor) -> Tensor:
    """Set the scheduler's timesteps as the stock pipeline does."""
    config, shift = pipeline.scheduler.config, {}
    if config.get("use_dynamic_shifting"):
        patch = pipeline.transformer.config.patch_size
        shift["mu"] = calculate_shift(
            (x.shape[-2] // patch) * (x.shape[-1] // patch),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.16),
        )
    return retrieve_timesteps(pipeline.scheduler, num_steps, x.device, sigmas=sigmas, **shift)[0]


def _image(pipeline, x: Tensor, output_type: str):
    if output_type == "latent":
        return x
    vae = pipeline.vae
    x = x.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    image = vae.decode(x, return_dict=False)[0]
    return pipeline.image_processor.postprocess(image, output_type=output_type)
