import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal

from flow_grpo.losses import (
    clipped_surrogate,
    dpo_loss,
    flow_matching_error,
    guard_log_ratio,
    nft_loss,
    velocity_kl,
)

RATIOS = [0.5, 0.9, 1.0, 1.05, 2.0]
DOUBLE = torch.float64


def surrogate(advantage, clip_range):
    log_ratio = torch.tensor(RATIOS, dtype=DOUBLE).log().requires_grad_()
    advantages = torch.full((5,), advantage, dtype=DOUBLE)
    result = clipped_surrogate(log_ratio, advantages, clip_range=clip_range)
    result.loss.sum().backward()
    return result.loss.tolist(), result.clipped.tolist(), log_ratio.grad.tolist()


def test_a_good_sample_gains_nothing_above_the_clip():
    # A = 2, range 0.1: -min(2 r, 2 clip(r, 0.9, 1.1)).
    loss, clipped, gradient = surrogate(2.0, 0.1)
    assert loss == pytest.approx([-1.0, -1.8, -2.0, -2.1, -2.2])
    assert clipped == [False, False, False, False, True]
    # d loss / d log_ratio = -A r inside; clipped away at ratio 2.
    assert gradient == pytest.approx([-1.0, -1.8, -2.0, -2.1, 0.0])
    assert gradient[4] == 0.0


def test_a_bad_sample_gains_nothing_below_the_clip():
    # A = -1, range 0.2: max(r, clip(r, 0.8, 1.2)).
    loss, clipped, gradient = surrogate(-1.0, 0.2)
    assert loss == pytest.approx([0.8, 0.9, 1.0, 1.05, 2.0])
    assert clipped == [True, False, False, False, False]
    assert gradient == pytest.approx([0.0, 0.9, 1.0, 1.05, 2.0])
    assert gradient[0] == 0.0


def test_the_clip_range_may_be_asymmetric():
    # (low, high) = (0.2, 0.02): the ratio is held to [0.8, 1.02].
    for clip_range in ((0.2, 0.02), [0.2, 0.02]):
        loss, clipped, gradient = surrogate(1.0, clip_range)
        assert loss == pytest.approx([-0.5, -0.9, -1.0, -1.02, -1.02])
        assert clipped == [False, False, False, True, True]
        assert gradient == pytest.approx([-0.5, -0.9, -1.0, 0.0, 0.0])
    loss, clipped, gradient = surrogate(-1.0, (0.2, 0.02))
    assert loss == pytest.approx([0.8, 0.9, 1.0, 1.05, 2.0])
    assert clipped == [True, False, False, False, False]
    assert gradient == pytest.approx([0.0, 0.9, 1.0, 1.05, 2.0])


def test_zero_advantage_gives_zero_loss_and_gradient_and_is_never_clipped():
    loss, clipped, gradient = surrogate(0.0, 0.1)
    assert not any(loss)
    assert not any(clipped)
    assert not any(gradient)


def test_the_gradient_is_zero_exactly_where_it_says_clipped():
    # Ratios of every kind around 1 +- 1e-6 in float32, where a float holds the range in 8 to 16
    # steps; many products -A r and -A clip(r) round to the same float.
    generator = torch.Generator().manual_seed(0)
    log_ratio = (4e-6 * torch.randn(20_000, generator=generator)).requires_grad_()
    advantage = torch.randn(20_000, generator=generator)
    clip_range = (1e-6, 2e-6)
    result = clipped_surrogate(log_ratio, advantage, clip_range=clip_range)
    result.loss.sum().backward()
    assert torch.equal(log_ratio.grad == 0, result.clipped)
    free = ~result.clipped
    expected = (-advantage * result.ratio)[free]
    assert torch.equal(log_ratio.grad[free], expected.detach())
    assert torch.equal(result.ratio, log_ratio.exp())
    # PPO's own words for the loss and for who is clipped.
    bounded = result.ratio.clamp(1 - 1e-6, 1 + 2e-6)
    assert torch.equal(result.loss, torch.maximum(-advantage * result.ratio, -advantage * bounded))
    above = (advantage > 0) & (result.ratio > 1 + 2e-6)
    below = (advantage < 0) & (result.ratio < 1 - 1e-6)
    assert torch.equal(result.clipped, above | below)
    assert 0.1 < result.clipped.float().mean() < 0.9


def test_a_float64_advantage_does_not_change_the_precision_of_the_loss():
    advantage = torch.tensor([0.3], dtype=DOUBLE)
    loss, ratio, _ = clipped_surrogate(torch.zeros(1), advantage, clip_range=1e-4)
    assert loss.dtype == ratio.dtype == torch.float32
    assert loss.item() == pytest.approx(-0.3)
    assert ratio.item() == 1.0


def test_ratio_is_exp_of_the_log_ratio():
    result = clipped_surrogate(torch.tensor([0.5]), torch.ones(1), clip_range=0.1)
    assert result.ratio.item() == pytest.approx(math.exp(0.5))


def states(count, *shape, seed=0, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("std", [0.006, 0.3, 0.95])
def test_guards_log_ratio_is_the_unbiased_log_ratio_times_std_whatever_std_is(std):
    noise, old_mean, change = states(3, 5, 2, 3, 3)
    mean = old_mean + 0.01 * change
    x_next = old_mean + std * noise
    new = Normal(mean, std).log_prob(x_next).flatten(1).mean(1)
    old = Normal(old_mean, std).log_prob(x_next).flatten(1).mean(1)
    bias = (mean - old_mean).square().flatten(1).mean(1) / (2 * std**2)
    expected = (new - old + bias) * std
    found = guard_log_ratio(noise, mean, old_mean)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_guards_log_ratio_has_mean_0_under_the_old_policy():
    # noise . change / D is Normal(0, |change|^2 / D^2) exactly, so the mean of N draws is within
    # 4 standard errors of 0; the plain log-ratio's mean is -|change|^2 / (2 D std^2).
    draws, size, std = 40_000, 12, 0.1
    noise = torch.randn(draws, size, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    (change,) = states(1, 1, size)
    change = 0.1 * change
    guarded = guard_log_ratio(
        noise, change.expand(draws, -1), torch.zeros(draws, size, dtype=DOUBLE)
    )
    spread = change.square().sum().sqrt().item() / size
    assert abs(guarded.mean().item()) < 4 * spread / draws**0.5
    assert guarded.std().item() == pytest.approx(spread, rel=0.02)  # 1 / sqrt(2 N) is 0.0035
    x_next = std * noise
    plain = (Normal(change, std).log_prob(x_next) - Normal(0.0, std).log_prob(x_next)).mean(1)
    bias = -change.square().sum().item() / (2 * size * std**2)
    assert plain.mean().item() == pytest.approx(bias, abs=4 * spread / std / draws**0.5)
    assert bias < -40 * spread / std / draws**0.5


def test_guards_gradient_is_the_noise_over_the_number_of_elements():
    noise, old_mean = states(2, 3, 2, 2, 2)
    mean = old_mean.clone().requires_grad_()
    log_ratio = guard_log_ratio(noise, mean, old_mean)
    assert log_ratio.tolist() == [0.0] * 3
    log_ratio.sum().backward()
    torch.testing.assert_close(mean.grad, noise / 8, rtol=1e-12, atol=0)


def test_velocity_kl_is_the_mean_squared_distance_per_element():
    velocity, reference = torch.zeros(2, 1, 2, 2, dtype=torch.bfloat16), torch.zeros(2, 1, 2, 2)
    reference[0, 0, 0, 0], reference[1] = 2.0, 3.0
    distance = velocity_kl(velocity, reference)
    assert distance.dtype == torch.float32
    assert distance.tolist() == [1.0, 9.0]  # 4 / 4 elements; 9


def test_velocity_kl_with_std_is_divided_by_twice_its_square_and_a_little():
    velocity, reference = (
        torch.zeros(3, 1, 2, 2, dtype=DOUBLE),
        torch.ones(3, 1, 2, 2, dtype=DOUBLE),
    )
    reference[1] = 3.0
    std = torch.tensor([0.5, 2.0, 0.0], dtype=DOUBLE).reshape(3, 1, 1, 1)
    # Distances 1, 9, 1 over 2 * 0.25, 2 * 4 and 0, plus 1e-7.
    expected = [1 / 0.5000001, 9 / 8.0000001, 1e7]
    assert velocity_kl(velocity, reference, std=std).tolist() == pytest.approx(expected, rel=1e-12)


def test_flow_matching_error_is_against_noise_minus_x_0():
    velocity = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    x_0 = torch.tensor([[[1.0, 1.0]], [[2.0, -1.0]]])
    noise = torch.tensor([[[3.0, 3.0]], [[2.0, -1.0]]])
    # Targets (2, 2) and (0, 0): errors (1, 0) -> 0.5, and 0.
    assert flow_matching_error(velocity, x_0, noise).tolist() == [0.5, 0.0]
    half = flow_matching_error(velocity.bfloat16(), x_0.bfloat16(), noise.bfloat16())
    assert half.dtype == torch.float32


def test_dpo_loss_is_log_2_at_the_reference_whatever_beta_is():
    winner, loser = states(2, 4)
    for beta in (0.5, 100.0, 2000.0):
        loss, inside = dpo_loss(winner, loser, winner, loser, beta=beta)
        assert loss.tolist() == pytest.approx([math.log(2)] * 4, abs=1e-15)
        assert inside.tolist() == [0.0] * 4


def test_dpo_loss_is_the_cross_entropy_of_the_implicit_rewards_difference():
    errors = [error.square().requires_grad_() for error in states(4, 50)]
    beta = 3.0
    loss, inside = dpo_loss(*errors, beta=beta)
    winner, loser, reference_winner, reference_loser = errors
    # The implicit reward of a sample is beta / 2 times how much its error fell.
    logits = beta / 2 * (reference_winner - winner) - beta / 2 * (reference_loser - loser)
    torch.testing.assert_close(inside, logits, rtol=1e-12, atol=1e-14)
    expected = F.binary_cross_entropy_with_logits(
        logits, torch.ones(50, dtype=DOUBLE), reduction="none"
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    found = torch.autograd.grad(loss.sum(), errors, retain_graph=True)
    by_entropy = torch.autograd.grad(expected.sum(), errors)
    for own, other in zip(found, by_entropy):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-14)
    # Descent lowers the winner's error and raises the loser's: +- beta / 2 sigmoid(-inside).
    torch.testing.assert_close(found[0], beta / 2 * torch.sigmoid(-inside), rtol=1e-10, atol=0)
    torch.testing.assert_close(found[1], -found[0], rtol=1e-12, atol=0)
    assert (found[0] > 0).all()


def test_dpo_loss_stays_finite_for_pairs_far_apart():
    errors = torch.tensor([[20.0, 0.0]], requires_grad=True)
    loss, inside = dpo_loss(errors[:, 0], errors[:, 1], torch.zeros(1), torch.zeros(1), beta=100.0)
    assert inside.item() == -1000.0
    assert loss.item() == 1000.0
    loss.sum().backward()
    assert errors.grad.tolist() == [[50.0, -50.0]]


def test_nothing_here_waits_for_the_device():
    # Reading a value of a meta tensor raises.
    v, row = torch.empty(2, 1, 2, 2, device="meta"), torch.empty(2, device="meta")
    std = torch.empty(2, 1, 1, 1, device="meta")
    losses = [
        *clipped_surrogate(row, row, clip_range=(1e-4, 2e-4)),
        guard_log_ratio(v, v, v),
        velocity_kl(v, v),
        velocity_kl(v, v, std=std),
        flow_matching_error(v, v, v),
        *dpo_loss(row, row, row, row, beta=1.0),
        nft_loss(v, v, v, v, row, row, beta=1.0),
    ]
    assert all(loss.shape == (2,) for loss in losses)
