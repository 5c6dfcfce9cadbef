import math

import pytest
import torch

from flow_grpo.losses import clipped_surrogate, velocity_kl

RATIOS = [0.5, 0.9, 1.0, 1.05, 2.0]


def surrogate(advantage, clip_range):
    log_prob = torch.tensor(RATIOS, dtype=torch.float64).log().requires_grad_()
    advantages = torch.full((5,), advantage, dtype=torch.float64)
    loss, ratio = clipped_surrogate(
        log_prob, torch.zeros(5, dtype=torch.float64), advantages, clip_range=clip_range
    )
    loss.sum().backward()
    return loss.tolist(), ratio.tolist(), log_prob.grad.tolist()


def test_a_good_sample_gains_nothing_above_the_clip():
    # A = 2, range 0.1: -min(2 r, 2 clip(r, 0.9, 1.1)).
    loss, ratio, gradient = surrogate(2.0, 0.1)
    assert ratio == pytest.approx(RATIOS)
    assert loss == pytest.approx([-1.0, -1.8, -2.0, -2.1, -2.2])
    # d loss / d log_prob = -A r inside; clipped away at ratio 2.
    assert gradient[0] == pytest.approx(-1.0)
    assert gradient[2:4] == pytest.approx([-2.0, -2.1])
    assert gradient[4] == 0.0


def test_a_bad_sample_gains_nothing_below_the_clip():
    # A = -1, range 0.1: max(r, clip(r, 0.9, 1.1)).
    loss, _, gradient = surrogate(-1.0, 0.1)
    assert loss == pytest.approx([0.9, 0.9, 1.0, 1.05, 2.0])
    assert gradient[0] == 0.0
    assert gradient[2:] == pytest.approx([1.0, 1.05, 2.0])


def test_the_clip_range_may_be_asymmetric():
    # (low, high) = (0.2, 0.02): the ratio is held to [0.8, 1.02].
    loss, _, gradient = surrogate(1.0, (0.2, 0.02))
    assert loss == pytest.approx([-0.5, -0.9, -1.0, -1.02, -1.02])
    assert gradient == pytest.approx([-0.5, -0.9, -1.0, 0.0, 0.0])
    loss, _, gradient = surrogate(-1.0, (0.2, 0.02))
    assert loss == pytest.approx([0.8, 0.9, 1.0, 1.05, 2.0])
    assert gradient == pytest.approx([0.0, 0.9, 1.0, 1.05, 2.0])


def test_zero_advantage_gives_zero_loss_and_gradient():
    loss, _, gradient = surrogate(0.0, 0.1)
    assert not any(loss)
    assert not any(gradient)


def test_a_float64_advantage_does_not_change_the_precision_of_the_loss():
    advantage = torch.tensor([0.3], dtype=torch.float64)
    loss, ratio = clipped_surrogate(torch.zeros(1), torch.zeros(1), advantage, clip_range=1e-4)
    assert loss.dtype == ratio.dtype == torch.float32
    assert loss.item() == pytest.approx(-0.3)
    assert ratio.item() == 1.0


def test_ratio_is_exp_of_the_difference():
    _, ratio = clipped_surrogate(
        torch.tensor([-1.0]), torch.tensor([-1.5]), torch.ones(1), clip_range=0.1
    )
    assert ratio.item() == pytest.approx(math.exp(0.5))


def test_velocity_kl_is_the_mean_squared_distance_per_element():
    velocity, reference = torch.zeros(2, 1, 2, 2, dtype=torch.bfloat16), torch.zeros(2, 1, 2, 2)
    reference[0, 0, 0, 0], reference[1] = 2.0, 3.0
    assert velocity_kl(velocity, reference).tolist() == [1.0, 9.0]  # 4 / 4 elements; 9
