"""Losses per row; the caller sums and weighs them. The Gaussian KL is sde.kl.

All maths is float32 or wider whatever comes in; nothing here waits for the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# DeepGen's guard against a division by zero in the velocity KL.
STD_SQUARE_FLOOR = 1e-7
# The smallest error that DiffusionNFT divides by.
NFT_WEIGHT_FLOOR = 1e-5


class Surrogate(NamedTuple):
    """PPO's loss of a row, its ratio, and whether the clamp took the gradient away."""

    loss: Tensor  # (b,)
    ratio: Tensor  # (b,)
    clipped: Tensor  # (b,) bool


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _mean(values: Tensor) -> Tensor:
    """Average (b, *latent) over the latent elements: (b,)."""
    return values.flatten(1).mean(1)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, *, clip_range: float | tuple[float, float]
) -> Surrogate:
    """Return PPO's loss of rows (b,): max(-A ratio, -A clipped ratio), ratio = exp(log_ratio).

    The ratio is clipped to [1 - low, 1 + high] with clip_range = (low, high), or one float for
    both. Log-ratios are means per latent element, so sensible ranges are 1e-3 to 1e-6.
    `clipped`: A > 0 and ratio > 1 + high, or A < 0 and ratio < 1 - low; the gradient is 0 there.
    Source: Schulman et al. 2017, arXiv 1707.06347.
    """
    low, high = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    ratio = torch.exp(log_ratio)
    advantage = advantage.to(ratio.dtype)
    clamped = ratio.clamp(1 - low, 1 + high)
    clipped = ((advantage > 0) & (ratio > clamped)) | ((advantage < 0) & (ratio < clamped))
    # Not torch.maximum: where rounding makes its arguments equal it passes half a gradient on.
    loss = -advantage * torch.where(clipped, clamped, ratio)
    return Surrogate(loss, ratio, clipped)


def guard_log_ratio(noise: Tensor, mean: Tensor, old_mean: Tensor) -> Tensor:
    """Return GRPO-Guard's normalised log-ratio of a step x_next = old_mean + std noise: (b,).

    The mean of noise * (mean - old_mean) per latent element, which equals std times (log_prob -
    old_log_prob + the mean of (mean - old_mean)^2 / (2 std^2)): its expectation under the old
    policy is 0 and it does not depend on std. Source: arXiv 2510.22319.
    """
    return _mean(_wide(noise) * (_wide(mean) - _wide(old_mean)))


def velocity_kl(
    velocity: Tensor, reference_velocity: Tensor, *, std: Tensor | None = None
) -> Tensor:
    """Return the mean squared distance of two velocities per latent element: (b,).

    The KL of MR-GRPO and of steps without a normalised density (arXiv 2602.12205, eq. 4). With std
    (b, 1, ...) it is divided by 2 std^2 + 1e-7, as MR-GRPO's published code does.
    """
    square = (_wide(velocity) - _wide(reference_velocity)).square()
    if std is not None:
        square = square / (2 * _wide(std).square() + STD_SQUARE_FLOOR)
    return _mean(square)


def flow_matching_error(velocity: Tensor, x_0: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error per latent element against noise - x_0: (b,)."""
    return _mean((_wide(velocity) - (_wide(noise) - _wide(x_0))).square())


def dpo_loss(
    winner_error: Tensor,
    loser_error: Tensor,
    reference_winner_error: Tensor,
    reference_loser_error: Tensor,
    *,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return (loss (b,), inside (b,)) of pairs' flow matching errors: -log sigmoid(inside).

    inside = -beta / 2 ((winner - reference winner) - (loser - reference loser)); it is positive
    where the policy prefers the winner more than the reference does.
    Source: Wallace et al. 2023, arXiv 2311.12908.
    """
    gain = (winner_error - reference_winner_error) - (loser_error - reference_loser_error)
    inside = -0.5 * beta * gain
    return -F.logsigmoid(inside), inside


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    x: Tensor,
    x_0: Tensor,
    sigma: Tensor,
    preference: Tensor,
    *,
    beta: float,
) -> Tensor:
    """Return DiffusionNFT's loss (b,): x_0 is predicted by a good and by a bad implicit policy.

    Their velocities are old_velocity +- beta (velocity - old_velocity); the squared error of each
    is divided by its mean absolute error (detached, at least 1e-5) and weighed by preference (b,)
    in [0, 1] and 1 - preference. sigma is (b,). Source: arXiv 2509.16117.
    """
    velocity, old_velocity, x, x_0 = map(_wide, (velocity, old_velocity, x, x_0))
    sigma = sigma.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    preference = preference.to(x.dtype)
    change = beta * (velocity - old_velocity)

    def weighted_error(implicit_velocity: Tensor) -> Tensor:
        error = x - sigma * implicit_velocity - x_0
        weight = _mean(error.detach().abs()).clamp(min=NFT_WEIGHT_FLOOR)
        return _mean(error.square()) / weight

    good = weighted_error(old_velocity + change)
    bad = weighted_error(old_velocity - change)
    return (preference * good + (1 - preference) * bad) / beta
