"""Turn images into the latents that a flow is trained on, and back, by a pipeline's autoencoder.

Two kinds: one scale and shift for all channels (`AutoencoderKL`: SD3, FLUX.1, Z-Image), and a mean
and standard deviation a channel over clips (`AutoencoderKLWan`, `AutoencoderKLQwenImage`).
"""

import torch
from torch import Tensor, nn


def encode_shifted(vae: nn.Module, images: Tensor) -> Tensor:
    """Return the mode (b, c, h', w'), float32, for images (b, 3, h, w) in [0, 1]."""
    x = vae.encode((images * 2 - 1).to(vae.dtype)).latent_dist.mode()
    return ((x - vae.config.shift_factor) * vae.config.scaling_factor).float()


def decode_shifted(vae: nn.Module, x: Tensor) -> Tensor:
    """Return images (b, 3, h, w) in [0, 1], float32, of latents (b, c, h', w')."""
    x = x.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return (vae.decode(x, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)


def encode_standardised(vae: nn.Module, clips: Tensor) -> Tensor:
    """Return the mode (b, c, f', h', w'), float32, for clips (b, f, 3, h, w) in [0, 1]."""
    mean, std = _statistics(vae)
    pixels = (clips * 2 - 1).to(vae.dtype).transpose(1, 2)
    x = torch.cat([vae.encode(clip).latent_dist.mode() for clip in pixels.split(1)])
    return ((x - mean) / std).float()


def decode_standardised(vae: nn.Module, x: Tensor) -> Tensor:
    """Return clips (b, f, 3, h, w) in [0, 1], float32, of latents (b, c, f', h', w').

    One clip at a time; within it the autoencoder takes one frame of latents (4 of pixels) after
    another and remembers what its causal convolutions need, so memory grows with neither.
    """
    mean, std = _statistics(vae)
    latents = x.to(vae.dtype) * std + mean
    clips = torch.cat([vae.decode(latent, return_dict=False)[0] for latent in latents.split(1)])
    return (clips.transpose(1, 2).float() / 2 + 0.5).clamp(0, 1)


def _statistics(vae: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of the latents, (1, c, 1, 1, 1)."""
    weight = next(vae.parameters())
    mean, std = (
        weight.new_tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
