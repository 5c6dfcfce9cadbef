"""GRPO-Guard's ratio and gradient by mathematics, and what it shares with GRPO: clips and KLs.

An old policy with a velocity of 0 makes the steps. Slopes |d mean / d velocity| and stds below are
derived here from the SDEs, not read from `flow_grpo.sde`.
"""

import math

import pytest
import torch
import toy

from config.base import locked_config
from flow_grpo import sde
from flow_grpo.algorithms.grpo import Grpo
from flow_grpo.algorithms.grpo_guard import GrpoGuard

SDES = ("flow_sde", "cps", "dance_sde")
BOTH = (Grpo, GrpoGuard)
NOISE_LEVEL = 0.7
SHAPE = (1, 2, 2)
SIZE = 4  # latent elements


def algorithm(kind=GrpoGuard, sde_type="flow_sde", *, noise_level=NOISE_LEVEL, **train):
    config = locked_config()
    config.sample.sde_type, config.sample.noise_level = sde_type, noise_level
    config.train.clip_range = 0.1
    for name, value in train.items():
        config.train[name] = value
    return kind(config)


def slope(sde_type: str, sigma: float, sigma_next: float, noise_level=NOISE_LEVEL) -> float:
    """Return |d mean / d velocity|: the drift's, times dt; the score is -(x + (1-s) v) / s."""
    dt, half_square = sigma - sigma_next, noise_level**2 / 2
    if sde_type == "flow_sde":  # s^2 = a^2 sigma / (1 - sigma), also in the score's coefficient
        return dt * (1 + half_square * (sigma < 1))
    if sde_type == "dance_sde":
        return dt * (1 + half_square * (1 - sigma) / sigma)
    # x_0 = x - s v and noise = x + (1-s) v, mixed as (1 - s') x_0 + s' cos noise
    return abs(
        (1 - sigma_next) * sigma - sigma_next * math.cos(noise_level * math.pi / 2) * (1 - sigma)
    )


def std(sde_type: str, sigma: float, sigma_next: float, noise_level=NOISE_LEVEL) -> float:
    dt = sigma - sigma_next
    return {
        "flow_sde": noise_level * math.sqrt(sigma / (1 - sigma) * dt) if sigma < 1 else math.nan,
        "dance_sde": noise_level * math.sqrt(dt),
        "cps": sigma_next * math.sin(noise_level * math.pi / 2),
    }[sde_type]


def batch(advantages, noise, *, sigma=0.8, sigma_next=0.6, sde_type="flow_sde", reference=None,
          noise_level=NOISE_LEVEL, log_ratio=0.0):  # fmt: skip
    """Return steps that the old policy took with this noise (b, *SHAPE).

    log_ratio is how much likelier (GRPO) the policy finds them than it said when it took them.
    """
    num = len(noise)
    x = torch.linspace(-1, 1, num * SIZE).reshape(num, *SHAPE)
    levels = [torch.full((num,), level) for level in (sigma, sigma_next)]
    kind = sde.SDES[sde_type]
    step = kind.step(
        x, torch.zeros_like(x), *levels, noise_level=noise_level, sigma_max=torch.tensor(0.9)
    )
    x_next = sde.sample(step, noise)
    kept = {
        "latents": x, "next_latents": x_next, "old_means": step.mean,
        "log_probs": sde.log_prob(step, x_next, normalised=kind.normalised) - log_ratio,
    }  # fmt: skip
    if reference is not None:
        kept["reference_velocity"] = torch.full_like(x, reference)
    return toy.row_batch(advantages, kept=kept, sigma=levels[0], sigma_next=levels[1])


def normal(num: int, seed=0) -> torch.Tensor:
    return torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(seed))


ZERO = torch.tensor(0.0)


@pytest.mark.parametrize("sde_type", SDES)
@pytest.mark.parametrize("sigma", [1.0, 0.8, 0.3])
def test_on_policy_the_log_ratio_is_exactly_0(sde_type, sigma):
    rows = batch([1.0, -2.0], normal(2), sigma=sigma, sigma_next=sigma - 0.1, sde_type=sde_type)
    _, metrics = algorithm(sde_type=sde_type).loss(toy.TensorPolicy(ZERO), rows)
    assert torch.equal(metrics["log_ratio"], torch.zeros(2))
    assert torch.equal(metrics["ratio"], torch.ones(2))


@pytest.mark.parametrize("sde_type", SDES)
def test_the_log_ratio_of_a_moved_policy_is_centred_and_grpos_is_not(sde_type):
    # The policy's mean lies `distance` away; GRPO's expected log-ratio is -z^2 / 2 with
    # z = distance / std, of deviation z / sqrt(SIZE); Guard's is 0, of distance / sqrt(SIZE).
    num, sigma, sigma_next, noise_level = 4000, 0.2, 0.1, 0.3
    states = {"sigma": sigma, "sigma_next": sigma_next, "noise_level": noise_level}
    rows = batch([1.0] * num, normal(num), sde_type=sde_type, **states)
    policy = toy.TensorPolicy(torch.tensor(0.3))
    found = {}
    for kind in BOTH:
        _, metrics = algorithm(kind, sde_type, noise_level=noise_level).loss(policy, rows)
        found[kind] = metrics["log_ratio"].mean().item()
    distance = 0.3 * slope(sde_type, **states)
    error = distance / math.sqrt(SIZE * num)
    assert abs(found[GrpoGuard]) < 4 * error
    z = distance / std(sde_type, **states)
    if sde_type == "cps":  # -(x_next - mean)^2 without std: -distance^2, deviation 2 std distance
        expected, error = -(distance**2), 2 * error * std(sde_type, **states)
    else:
        expected, error = -(z**2) / 2, z / math.sqrt(SIZE * num)
    assert found[Grpo] == pytest.approx(expected, abs=4 * error)
    assert found[Grpo] < -8 * error


@pytest.mark.parametrize("sde_type", SDES)
def test_the_log_ratio_is_the_mean_of_noise_times_the_move(sde_type):
    noise = normal(3)
    rows = batch([1.0] * 3, noise, sde_type=sde_type)
    _, metrics = algorithm(sde_type=sde_type).loss(toy.TensorPolicy(torch.tensor(-0.5)), rows)
    expected = noise.flatten(1).mean(1) * 0.5 * slope(sde_type, 0.8, 0.6)  # mean falls with v
    torch.testing.assert_close(metrics["log_ratio"], expected, rtol=1e-4, atol=1e-6)


STEPS = [(1.0, 0.9), (0.9, 0.7), (0.5, 0.45), (0.1, 0.04)]


@pytest.mark.parametrize(("sigma", "sigma_next"), STEPS)
@pytest.mark.parametrize("sde_type", SDES)
def test_the_gradient_has_the_published_size_at_every_step(sde_type, sigma, sigma_next):
    # For advantage A: A noise / SIZE times f, which is 1 at sigma 1 and 1 + a^2 / 2 after for
    # Flow-SDE, 1 + a^2 (1 - sigma) / (2 sigma) for Dance-SDE, 1 everywhere for CPS.
    noise = normal(2)
    policy = toy.TensorPolicy(torch.zeros(2, *SHAPE))
    rows = batch([3.0, -1.0], noise, sigma=sigma, sigma_next=sigma_next, sde_type=sde_type)
    algorithm(sde_type=sde_type).loss(policy, rows)[0].backward()
    half_square = NOISE_LEVEL**2 / 2
    factor = {
        "flow_sde": 1.0 if sigma == 1 else 1 + half_square,
        "dance_sde": 1 + half_square * (1 - sigma) / sigma,
        "cps": 1.0,
    }[sde_type]
    expected = torch.tensor([3.0, -1.0]).reshape(2, 1, 1, 1) * noise / SIZE * factor
    torch.testing.assert_close(policy.current.grad, expected, rtol=1e-4, atol=1e-6)


def test_grpos_own_gradients_differ_by_an_order_over_the_same_steps():
    sizes = []
    for sigma, sigma_next in STEPS[1:]:
        policy = toy.TensorPolicy(torch.zeros(1, *SHAPE))
        rows = batch([1.0], torch.ones(1, *SHAPE), sigma=sigma, sigma_next=sigma_next)
        algorithm(Grpo).loss(policy, rows)[0].backward()
        sizes.append(policy.current.grad.abs().mean().item() * SIZE)
        expected = slope("flow_sde", sigma, sigma_next) / std("flow_sde", sigma, sigma_next)
        assert sizes[-1] == pytest.approx(expected, rel=1e-3)
    assert max(sizes) > 4 * min(sizes)


@pytest.mark.parametrize("kind", BOTH)
def test_no_advantage_gives_no_gradient(kind):
    policy = toy.TensorPolicy(torch.tensor(0.3))
    algorithm(kind).loss(policy, batch([0.0, 0.0], normal(2)))[0].backward()
    assert policy.current.grad.item() == 0.0


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.25, 2.0, -2.50, False),  # inside 1 + 0.3
        (1.50, 2.0, -2.60, True),
        (1.50, -2.0, 3.00, False),
        (0.95, -2.0, 1.90, False),  # inside 1 - 0.1
        (0.80, -2.0, 1.80, True),
        (0.80, 2.0, -1.60, False),
    ],
)
def test_the_clip_range_may_be_asymmetric(kind, ratio, advantage, expected, clipped):
    noise = torch.ones(1, *SHAPE)
    if kind is Grpo:
        policy, rows = toy.TensorPolicy(ZERO), batch([advantage], noise, log_ratio=math.log(ratio))
    else:  # noise 1: the log-ratio is the move of the mean
        velocity = torch.tensor(-math.log(ratio) / slope("flow_sde", 0.8, 0.6))
        policy, rows = toy.TensorPolicy(velocity), batch([advantage], noise)
        expected = expected / (0.8 - 0.6)
    loss, metrics = algorithm(kind, clip_range_high=0.3).loss(policy, rows)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert metrics["ratio"].item() == pytest.approx(ratio, rel=1e-4)
    assert metrics["clipped"].item() == clipped
    assert metrics["clip_fraction"].item() == (ratio < 0.9 or ratio > 1.3)
    assert (policy.current.grad.item() == 0) == clipped


def kl_by_hand(kl_type: str, sde_type: str) -> float:
    """Return the KL of velocities 0.4 apart at the step 0.8 -> 0.6."""
    dt = 0.8 - 0.6
    distance = 0.4 * slope(sde_type, 0.8, 0.6)
    gaussian = (distance / std(sde_type, 0.8, 0.6)) ** 2 / 2
    # The published std: Flow-SDE's diffusion, without sqrt(dt).
    published = {
        "flow_sde": NOISE_LEVEL * math.sqrt(0.8 / (1 - 0.8)),
        "dance_sde": NOISE_LEVEL * math.sqrt(dt),
        "cps": 0.6 * math.sin(NOISE_LEVEL * math.pi / 2),
    }[sde_type]
    return {
        "gaussian": gaussian,
        "reference": gaussian * dt,
        "velocity": 0.4**2,
        "velocity_std": 0.4**2 / (2 * published**2),
        "auto": 0.4**2 if sde_type == "cps" else gaussian,
    }[kl_type]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("sde_type", SDES)
@pytest.mark.parametrize("kl_type", ["auto", "gaussian", "reference", "velocity", "velocity_std"])
def test_every_kl_is_what_its_name_says(kind, sde_type, kl_type):
    chosen = {"kl_type": kl_type}
    if kl_type == "reference":
        chosen = {"kl_type": "gaussian", "kl_scale": "reference"}
        if sde_type != "flow_sde":  # the published stds of the others hold sqrt(dt)
            with pytest.raises(ValueError, match=r"kl_scale \('reference'\) has the value"):
                algorithm(kind, sde_type, kl_coef=0.04, **chosen)
            return
    policy = toy.TensorPolicy(torch.tensor(0.5))
    rows = batch([0.0, 0.0], normal(2), sde_type=sde_type, reference=0.1)
    loss, metrics = algorithm(kind, sde_type, kl_coef=0.04, **chosen).loss(policy, rows)
    loss.backward()
    expected = kl_by_hand(kl_type, sde_type)
    assert metrics["kl"].tolist() == pytest.approx([expected] * 2, rel=1e-4)
    assert loss.item() == pytest.approx(2 * 0.04 * expected, rel=1e-4)
    assert metrics["loss"].tolist() == pytest.approx([0.04 * expected] * 2, rel=1e-4)
    # All are squares of the distance 0.4.
    assert policy.current.grad.item() == pytest.approx(2 * 0.04 * expected * 2 / 0.4, rel=1e-4)


@pytest.mark.parametrize("kind", BOTH)
def test_a_kl_type_or_scale_that_does_not_exist_is_refused(kind):
    with pytest.raises(
        ValueError, match=r"kl_type \('x-based'\) must be one of auto, gaussian, ve"
    ):
        algorithm(kind, kl_coef=0.1, kl_type="x-based")
    with pytest.raises(ValueError, match=r"kl_scale \('dt'\) must be one of true, reference"):
        algorithm(kind, kl_coef=0.1, kl_scale="dt")
    with pytest.raises(ValueError, match=r"adv_type \('gdp'\) must be one of grpo, gdpo, reinforc"):
        algorithm(kind, adv_type="gdp")


def test_what_a_rollout_keeps_for_it():
    assert algorithm().keeps == {"window", "old_mean"}
    assert algorithm().weights == frozenset()
    assert algorithm(kl_coef=0.1).keeps == {"window", "old_mean", "reference_velocity"}
    assert algorithm(kl_coef=0.1).weights == {"reference"}
    assert algorithm().rollout_weights == "current"
