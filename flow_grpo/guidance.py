"""Combine the velocities of a prompt and of its negative."""

from torch import Tensor


def classifier_free(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """Extrapolate from the negative's velocity through the prompt's; scale 1 is the prompt's.

    Source: Ho and Salimans 2022, arXiv 2207.12598.
    """
    return negative + guidance_scale * (positive - negative)


def norm_preserving(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """Extrapolate, then give every token (last axis) the norm that it has under the prompt alone.

    Source: Qwen-Image's pipeline in diffusers ("true" guidance).
    """
    guided = classifier_free(negative, positive, guidance_scale)
    return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
