"""Combine the velocities of a prompt and of its negative."""

from torch import Tensor


def classifier_free(negative: Tensor, positive: Tensor, guidance_scale: float) -> Tensor:
    """Extrapolate from the negative's velocity through the prompt's; scale 1 is the prompt's.

    Source: Ho and Salimans 2022, arXiv 2207.12598.
    """
    return negative + guidance_scale * (positive - negative)
