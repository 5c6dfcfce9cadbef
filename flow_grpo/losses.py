"""Losses per row; the caller sums and weighs them. The Gaussian KL is sde.kl."""

import torch
from torch import Tensor


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    clip_range: float | tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Return PPO's (loss (b,), ratio (b,)) of rows (b,): max(-A ratio, -A clipped ratio).

    The ratio is clipped to [1 - low, 1 + high] with clip_range = (low, high), or one float for
    both. Log-probs are means per latent element, so sensible ranges are 1e-3 to 1e-6.
    Source: Schulman et al. 2017, arXiv 1707.06347.
    """
    low, high = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    ratio = torch.exp(log_prob - old_log_prob)
    advantage = advantage.to(ratio.dtype)
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-advantage * ratio, -advantage * clipped), ratio


def velocity_kl(velocity: Tensor, reference_velocity: Tensor) -> Tensor:
    """Return the mean squared distance of two velocities per latent element: (b,) float32.

    The KL of MR-GRPO and of steps without a normalised density (arXiv 2602.12205, eq. 4).
    """
    return (velocity.float() - reference_velocity.float()).square().flatten(1).mean(1)
