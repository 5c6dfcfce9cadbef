"""GRPO's loss by hand, on a policy whose velocity is one number."""

import math

import pytest
import torch

from config.base import locked_config
from flow_grpo import sde
from flow_grpo.algorithms.base import RowBatch, Scores
from flow_grpo.algorithms.grpo import Grpo
from flow_grpo.models.base import Cond


class ConstantPolicy:
    """Answer every question with one trained number."""

    def __init__(self, velocity: float):
        self.weight = torch.tensor(velocity, requires_grad=True)

    def velocity(self, x, sigma, cond, guidance_scale, *, weights="current"):
        return self.weight.expand_as(x)


def algorithm(sde_type="flow_sde", **train) -> Grpo:
    config = locked_config()
    config.sample.sde_type = sde_type
    config.sample.noise_level = 0.7
    config.train.clip_range = 0.1
    for name, value in train.items():
        config.train[name] = value
    return Grpo(config)


SIGMA, SIGMA_NEXT, SHAPE = 0.8, 0.6, (1, 2, 2)


def batch(advantages, *, velocity=0.0, sde_type="flow_sde", log_ratio=0.0, weights=None, ref=None):
    """Return rows sampled by a policy of this velocity, whose ratio is then exp(log_ratio)."""
    num = len(advantages)
    x = torch.linspace(-1, 1, num * 4).reshape(num, *SHAPE)
    sigma, sigma_next = torch.full((num,), SIGMA), torch.full((num,), SIGMA_NEXT)
    step = sde.SDES[sde_type]
    transition = step.step(
        x, torch.full_like(x, velocity), sigma, sigma_next, noise_level=0.7,
        sigma_max=torch.tensor(0.9),
    )  # fmt: skip
    noise = torch.linspace(1, -1, num * 4).reshape(num, *SHAPE) + 0.3
    x_next = sde.sample(transition, noise)
    old = sde.log_prob(transition, x_next, normalised=step.normalised) - log_ratio
    kept = {"latents": x, "next_latents": x_next, "log_probs": old}
    if ref is not None:
        kept["reference_velocity"] = torch.full_like(x, ref)
    return RowBatch(
        kept=kept, sigma=sigma, sigma_next=sigma_next, sigma_max=torch.tensor(0.9),
        cond=Cond({"text": torch.zeros(num, 1)}), columns={}, noise=None,
        advantage=torch.tensor(advantages), weight=torch.tensor(weights or [1.0] * num),
    )  # fmt: skip


def test_on_policy_the_loss_is_minus_the_sum_of_the_advantages():
    loss, metrics = algorithm().loss(ConstantPolicy(0.0), batch([1.0, -2.0, 0.5]))
    assert loss.item() == pytest.approx(0.5, abs=1e-6)  # -(1 - 2 + 0.5)
    assert metrics["ratio"].tolist() == [1.0, 1.0, 1.0]
    assert metrics["clip_fraction"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.05, 2.0, -2.10),  # inside the range: -A ratio
        (1.50, 2.0, -2.20),  # a gain is clipped at 1 + 0.1
        (1.50, -2.0, 3.00),  # a loss is not
        (0.50, 2.0, -1.00),
        (0.50, -2.0, 1.80),  # 2 * (1 - 0.1)
    ],
)
def test_the_surrogate_is_clipped_on_the_side_that_gains(ratio, advantage, expected):
    rows = batch([advantage], log_ratio=math.log(ratio))
    loss, metrics = algorithm().loss(ConstantPolicy(0.0), rows)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["ratio"].item() == pytest.approx(ratio, rel=1e-5)
    assert metrics["clip_fraction"].item() == (abs(ratio - 1) > 0.1)
    assert metrics["approx_kl"].item() == pytest.approx(0.5 * math.log(ratio) ** 2, rel=1e-4)


def test_the_gradient_is_the_score_times_the_advantage():
    # d log_prob / d velocity of Normal(mean, std): the mean over elements of
    # (x_next - mean) / std^2 * d mean / d velocity = noise / std * slope
    policy, rows = ConstantPolicy(0.0), batch([3.0])
    algorithm().loss(policy, rows)[0].backward()
    sigma, dt, clear = SIGMA, SIGMA - SIGMA_NEXT, 1 - SIGMA
    slope = -(dt + 0.5 * 0.7**2 * dt * (1 - sigma) / clear)
    std = 0.7 * math.sqrt(sigma / clear * dt)
    noise = torch.linspace(1, -1, 4) + 0.3
    score = (noise / std).mean().item() * slope
    assert policy.weight.grad.item() == pytest.approx(-3.0 * score, rel=1e-5)


def test_no_advantage_gives_no_gradient():
    policy = ConstantPolicy(0.3)
    algorithm().loss(policy, batch([0.0, 0.0], velocity=0.1))[0].backward()
    assert policy.weight.grad.item() == 0.0


def test_padding_counts_for_nothing():
    one, two = ConstantPolicy(0.1), ConstantPolicy(0.1)
    rows = batch([1.0, 5.0], weights=[1.0, 0.0])
    loss, _ = algorithm().loss(one, rows)
    loss.backward()
    kept = {name: tensor[:1] for name, tensor in rows.kept.items()}
    first, _ = algorithm().loss(two, RowBatch(*(c[:1] if torch.is_tensor(c) and c.ndim else c
                                                for c in rows._replace(kept=kept))))  # fmt: skip
    first.backward()
    assert loss.item() == pytest.approx(first.item(), rel=1e-6)
    assert one.weight.grad.item() == pytest.approx(two.weight.grad.item(), rel=1e-5)


@pytest.mark.parametrize(("kl_scale", "scale"), [("true", 1.0), ("reference", SIGMA - SIGMA_NEXT)])
def test_the_kl_is_the_gaussian_one_and_the_reference_code_s_carries_dt(kl_scale, scale):
    policy = ConstantPolicy(0.5)
    rows = batch([0.0], velocity=0.5, ref=0.1)
    loss, metrics = algorithm(kl_coef=0.04, kl_scale=kl_scale).loss(policy, rows)
    dt, clear = SIGMA - SIGMA_NEXT, 1 - SIGMA
    slope = -(dt + 0.5 * 0.7**2 * dt * (1 - SIGMA) / clear)
    std = 0.7 * math.sqrt(SIGMA / clear * dt)
    gaussian = 0.5 * (slope * 0.4 / std) ** 2  # the means differ by slope * (0.5 - 0.1)
    assert metrics["kl"].item() == pytest.approx(gaussian * scale, rel=1e-5)
    assert loss.item() == pytest.approx(0.04 * gaussian * scale, rel=1e-5)
    loss.backward()  # the KL has a gradient: 2 * value / distance
    assert policy.weight.grad.item() == pytest.approx(0.04 * gaussian * scale * 2 / 0.4, rel=1e-4)


def test_cps_has_no_true_density_and_takes_the_kl_of_velocities():
    rows = batch([0.0], velocity=0.5, sde_type="cps", ref=0.1)
    _, metrics = algorithm("cps", kl_coef=0.04).loss(ConstantPolicy(0.5), rows)
    assert metrics["kl"].item() == pytest.approx(0.4**2, rel=1e-5)


def test_the_reference_is_kept_only_for_a_kl():
    assert algorithm().keeps == {"window"}
    assert algorithm(kl_coef=0.04).keeps == {"window", "reference_velocity"}


def scores(total, valid=None) -> Scores:
    total = torch.tensor(total, dtype=torch.float64)
    valid = torch.ones(len(total), dtype=torch.bool) if valid is None else torch.tensor(valid)
    states = {"r": torch.zeros(len(total), dtype=torch.uint8)}
    weights = {"r": torch.ones_like(total)}
    return Scores({"r": total}, weights, states, total, valid, torch.arange(len(total)) // 2)


@pytest.mark.parametrize(("kl_coef", "kept"), [(0.0, [2, 3]), (0.01, [0, 1, 2, 3])])
def test_rows_without_advantage_are_skipped_unless_a_kl_needs_them(kl_coef, kept):
    grpo = algorithm(kl_coef=kl_coef)
    found = scores([1.0, 1.0, 0.0, 4.0])
    advantages = grpo.advantages(found)
    assert advantages[:2].tolist() == [0.0, 0.0]
    rows = grpo.rows(advantages, found, num_steps=3, sigmas=None, generator=None)
    assert rows.samples[:, 0].tolist() == [sample for sample in kept for _ in range(3)]
    assert rows.columns["step"].tolist() == [0, 1, 2] * len(kept)


def test_failed_samples_are_never_trained_on():
    grpo = algorithm(kl_coef=0.01)
    found = scores([1.0, 3.0, 0.0, 4.0], [True, True, False, True])
    rows = grpo.rows(grpo.advantages(found), found, num_steps=1, sigmas=None, generator=None)
    assert rows.samples[:, 0].tolist() == [0, 1, 3]


def test_advantages_are_scaled_and_clipped_as_set():
    config = locked_config()
    config.train.adv_clip_max = 0.5
    found = scores([0.0, 2.0, 0.0, 6.0])  # group means 1 and 3; std of all: sqrt(6)
    assert Grpo(config).advantages(found).tolist() == pytest.approx(
        [-1 / (math.sqrt(6) + 1e-4), 1 / (math.sqrt(6) + 1e-4), -0.5, 0.5]
    )
    config.sample.global_std = False
    config.train.adv_clip_max = 5.0
    assert Grpo(config).advantages(found).tolist() == pytest.approx([-1, 1, -1, 1], rel=1e-3)


def test_an_unknown_kl_scale_is_refused():
    with pytest.raises(ValueError, match=r"train.kl_scale \('tru'\) must be one of true, refer"):
        algorithm(kl_coef=0.1, kl_scale="tru")
