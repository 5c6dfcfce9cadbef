"""DiffusionNFT's loss for one row, in symbols.

With u = (x - x_0) / sigma the velocity that predicts x_0 exactly, d = velocity - old_velocity and
delta = u - old_velocity, the errors of the two predictions are sigma (delta - beta d) and
sigma (delta + beta d). For constant weights w of both, the loss is
sigma^2 / (beta w) mean(r (delta - beta d)^2 + (1 - r) (delta + beta d)^2).
"""

import numpy as np
import pytest
import torch

from flow_grpo.losses import nft_loss

DOUBLE = torch.float64
SHAPE = (3, 2, 2, 2)
SIGMA = torch.tensor([0.9, 0.5, 0.2], dtype=DOUBLE)
PREFERENCE = torch.tensor([0.0, 0.3, 0.85], dtype=DOUBLE)


def states(count, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(*SHAPE, generator=generator, dtype=DOUBLE) for _ in range(count)]


def gradient(velocity, *rest, beta):
    velocity = velocity.clone().requires_grad_()
    nft_loss(velocity, *rest, beta=beta).sum().backward()
    return velocity.grad


def errors(velocity, old, x, x_0, sigma, beta):
    """Compute both implicit policies' errors of x_0 for one row, in numpy, as the paper says."""
    good = beta * velocity + (1 - beta) * old
    bad = (1 + beta) * old - beta * velocity
    return x - sigma * good - x_0, x - sigma * bad - x_0


@pytest.mark.parametrize("beta", [0.1, 1.0, 1.7])
def test_loss_and_gradient_agree_with_the_papers_formula_and_finite_differences(beta):
    velocity, old, x, x_0 = states(4)
    loss = nft_loss(velocity, old, x, x_0, SIGMA, PREFERENCE, beta=beta)
    found = gradient(velocity, old, x, x_0, SIGMA, PREFERENCE, beta=beta)
    assert loss.dtype == DOUBLE
    for row in range(3):
        fixed = [s[row].numpy() for s in (old, x, x_0, SIGMA)]
        r, start = PREFERENCE[row].item(), velocity[row].numpy()
        # The weights are constants: finite differences must hold them, too.
        w_good, w_bad = (np.abs(e).mean() for e in errors(start, *fixed, beta))

        def value(v, fixed=fixed, r=r, w_good=w_good, w_bad=w_bad):
            good, bad = errors(v, *fixed, beta)
            squares = r * np.square(good).mean() / w_good + (1 - r) * np.square(bad).mean() / w_bad
            return squares / beta

        assert loss[row].item() == pytest.approx(value(start), rel=1e-12)
        # Central differences of a quadratic are exact up to rounding, about 1e-16 / 1e-4.
        for place in np.ndindex(start.shape):
            nudge = np.zeros_like(start)
            nudge[place] = 1e-4
            slope = (value(start + nudge) - value(start - nudge)) / 2e-4
            assert found[row][place].item() == pytest.approx(slope, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("beta", [0.1, 1.0, 1.7])
def test_with_equal_weights_the_optimum_is_a_share_of_the_way_to_the_target(beta):
    # States so small that both mean absolute errors are below the floor 1e-5: equal weights.
    # r (delta - beta d) = (1 - r) (delta + beta d) <=> d = (2 r - 1) delta / beta.
    old, x, x_0 = states(3, scale=1e-7)
    target = (x - x_0) / SIGMA.reshape(-1, 1, 1, 1)
    share = ((2 * PREFERENCE - 1) / beta).reshape(-1, 1, 1, 1)
    optimum = old + share * (target - old)
    rest = old, x, x_0, SIGMA, PREFERENCE
    at_optimum = gradient(optimum, *rest, beta=beta)
    elsewhere = gradient(old, *rest, beta=beta)
    assert at_optimum.abs().max() < 1e-12 * elsewhere.abs().max()
    # And it is a minimum.
    (step,) = states(1, seed=5, scale=1e-8)
    best = nft_loss(optimum, *rest, beta=beta)
    assert (nft_loss(optimum + step, *rest, beta=beta) > best).all()
    assert (nft_loss(optimum - step, *rest, beta=beta) > best).all()


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_at_the_old_policy_the_gradient_points_to_the_target_by_2r_minus_1(beta):
    # d = 0: both errors are sigma delta, so both weights are w = sigma mean|delta| and the gradient
    # is -2 sigma^2 (2 r - 1) delta / (w D), whatever beta is.
    old, x, x_0 = states(3, seed=1)
    sigma, r = (s.reshape(-1, 1, 1, 1) for s in (SIGMA, PREFERENCE))
    delta = (x - x_0) / sigma - old
    weight = sigma * delta.abs().mean((1, 2, 3), keepdim=True)
    expected = -2 * sigma**2 * (2 * r - 1) * delta / (weight * 8)
    found = gradient(old, old, x, x_0, SIGMA, PREFERENCE, beta=beta)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_preference_one_half_is_neutral_at_the_old_policy_and_no_loss_free_zone():
    # At d = 0 the two halves cancel exactly, though neither is 0.
    old, x, x_0 = states(3, seed=2)
    half, one = torch.full((3,), 0.5, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE)
    assert gradient(old, old, x, x_0, SIGMA, half, beta=0.7).abs().max() < 1e-15
    assert gradient(old, old, x, x_0, SIGMA, one, beta=0.7).abs().max() > 1e-2
    # Away from it, with equal weights, the loss pulls back: gradient 2 sigma^2 beta d / (w D).
    old, x, x_0, change = states(4, seed=3, scale=1e-7)
    sigma = SIGMA.reshape(-1, 1, 1, 1)
    found = gradient(old + change, old, x, x_0, SIGMA, half, beta=0.7)
    expected = 2 * sigma**2 * 0.7 * change / (1e-5 * 8)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-14)


def test_adaptive_weights_keep_pulling_along_the_line_to_the_target():
    # On beta d = k delta, |k| < 1, the weights are (1 - k) m and (1 + k) m, which cancel the growth
    # of the errors: the gradient is that of k = 0, also at the constant weights' optimum 2 r - 1.
    old, x, x_0 = states(3, seed=4)
    beta, delta = 0.5, (x - x_0) / SIGMA.reshape(-1, 1, 1, 1) - old
    start = gradient(old, old, x, x_0, SIGMA, PREFERENCE, beta=beta)
    for k in (-0.7, 0.4, 0.7):
        moved = gradient(old + k / beta * delta, old, x, x_0, SIGMA, PREFERENCE, beta=beta)
        torch.testing.assert_close(moved, start, rtol=1e-9, atol=1e-14)


def test_rows_do_not_see_each_other_and_half_precision_is_widened():
    velocity, old, x, x_0 = states(4)
    whole = nft_loss(velocity, old, x, x_0, SIGMA, PREFERENCE, beta=0.3)
    for row in range(3):
        own = slice(row, row + 1)
        alone = nft_loss(*(s[own] for s in (velocity, old, x, x_0, SIGMA, PREFERENCE)), beta=0.3)
        torch.testing.assert_close(alone, whole[own], rtol=1e-14, atol=0)
    half = [s.bfloat16() for s in (velocity, old, x, x_0)]
    loss = nft_loss(*half, SIGMA.float(), PREFERENCE, beta=0.3)
    assert loss.dtype == torch.float32
    exact = nft_loss(*(s.double() for s in half), SIGMA.float(), PREFERENCE, beta=0.3)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)


def test_a_perfect_prediction_is_not_divided_by_zero():
    # x_0 predicted exactly by both: error 0, weight at its floor.
    old, x = states(2)
    x_0 = x - SIGMA.reshape(-1, 1, 1, 1) * old
    assert nft_loss(old, old, x, x_0, SIGMA, PREFERENCE, beta=0.1).abs().max() < 1e-20
    assert gradient(old, old, x, x_0, SIGMA, PREFERENCE, beta=0.1).isfinite().all()
