"""NFT's loss by finite differences and by its stationary points, and which samples it takes."""

import math

import numpy as np
import pytest
import torch
import toy

from config.base import locked_config
from flow_grpo.algorithms.base import Scores
from flow_grpo.algorithms.nft import Nft

NAN = math.nan


def algorithm(**train) -> Nft:
    config = locked_config()
    for name, value in train.items():
        config.train[name] = value
    return Nft(config)


def scores(rewards: dict[str, list[float]], weights=None, group_size=4) -> Scores:
    """Return the scores of some rewards, NaN where one failed."""
    values = {name: torch.tensor(each, dtype=torch.float64) for name, each in rewards.items()}
    states = {name: torch.where(v.isfinite(), 0, 2).to(torch.uint8) for name, v in values.items()}
    weights = {
        name: torch.full_like(v, (weights or {}).get(name, 1.0)) for name, v in values.items()
    }
    total = sum(values[name] * weights[name] for name in values)
    groups = torch.arange(len(total)) // group_size
    return Scores(values, weights, states, total, total.isfinite(), groups)


def trained(nft: Nft, found: Scores):
    return nft.rows(
        nft.advantages(found), found, num_steps=0, sigmas=torch.linspace(1, 0, 101)[:-1],
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def batch(advantages, seed=0):
    num = len(advantages)
    x_0, noise = torch.randn(2, num, *toy.SHAPE, generator=torch.Generator().manual_seed(seed))
    return toy.row_batch(
        advantages, kept={"final": x_0}, noise=noise, sigma=torch.linspace(0.2, 0.8, num)
    )


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_gradient_is_that_of_the_formula_with_constant_weights(beta, kl_coef):
    advantages, old, reference = [2.0, -9.0, 0.0], -0.2, 0.4
    rows = batch(advantages)
    x_0, noise, sigma = (t.double().numpy() for t in (rows.kept["final"], rows.noise, rows.sigma))
    start = np.random.default_rng(1).normal(size=(3, *toy.SHAPE))

    def predicted_errors(v):
        levels = sigma.reshape(-1, 1, 1, 1)
        x = (1 - levels) * x_0 + levels * noise
        signs = [beta * v + (1 - beta) * old, (1 + beta) * old - beta * v]
        return [x - levels * sign - x_0 for sign in signs]

    scale = [np.abs(error).mean((1, 2, 3)) for error in predicted_errors(start)]
    # 9 is beyond adv_clip_max = 5: r = clip(A / 5, -1, 1) / 2 + 1/2
    r = np.array([0.7, 0.0, 0.5])

    def value(v):
        good, bad = (np.square(e).mean((1, 2, 3)) / w for e, w in zip(predicted_errors(v), scale))
        policy = 5 * (r * good + (1 - r) * bad) / beta
        return (policy + kl_coef * np.square(v - reference).mean((1, 2, 3))).sum()

    policy = toy.TensorPolicy(
        torch.tensor(start, dtype=torch.float32),
        old=torch.tensor(old), reference=torch.tensor(reference),
    )  # fmt: skip
    loss, metrics = algorithm(nft_beta=beta, kl_coef=kl_coef).loss(policy, rows)
    loss.backward()
    assert loss.item() == pytest.approx(value(start), rel=1e-5)
    assert metrics["loss"].sum().item() == pytest.approx(loss.item(), rel=1e-6)
    expected = np.zeros_like(start)
    for place in np.ndindex(start.shape):  # exact for a quadratic, up to rounding
        nudge = np.zeros_like(start)
        nudge[place] = 1e-3
        expected[place] = (value(start + nudge) - value(start - nudge)) / 2e-3
    np.testing.assert_allclose(policy.current.grad.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_without_an_advantage_the_old_policy_is_stationary():
    velocity = torch.full(toy.SHAPE, 0.3)
    policy = toy.TensorPolicy(velocity, old=velocity)
    algorithm().loss(policy, batch([0.0, 0.0, 0.0]))[0].backward()
    assert policy.current.grad.abs().max() < 1e-6  # float32: two terms of order 1 cancel
    algorithm().loss(policy, batch([1.0, 0.0, 0.0]))[0].backward()
    assert policy.current.grad.abs().max() > 1e-2


def test_the_old_policy_s_gradient_is_linear_in_the_advantage_up_to_the_clip():
    gradients = {}
    for advantage in (1.0, -1.0, 2.0, 5.0, 50.0):
        velocity = torch.zeros(toy.SHAPE)
        policy = toy.TensorPolicy(velocity, old=velocity)
        algorithm().loss(policy, batch([advantage]))[0].backward()
        gradients[advantage] = policy.current.grad
    torch.testing.assert_close(gradients[-1.0], -gradients[1.0])
    torch.testing.assert_close(gradients[2.0], 2 * gradients[1.0])
    torch.testing.assert_close(gradients[50.0], gradients[5.0])


def test_metrics_name_the_distance_to_the_old_policy_and_the_kl():
    policy = toy.TensorPolicy(
        torch.tensor(0.3), old=torch.tensor(0.1), reference=torch.tensor(-0.1)
    )
    _, metrics = algorithm(kl_coef=0.1).loss(policy, batch([1.0, -1.0]))
    assert metrics["old_distance"].tolist() == pytest.approx([0.2**2] * 2, rel=1e-5)
    assert metrics["kl"].tolist() == pytest.approx([0.4**2] * 2, rel=1e-5)
    # No row's loss depends on another's.
    _, alone = algorithm(kl_coef=0.1).loss(policy, batch([1.0, -1.0])._replace(weight=ZERO_ONE))
    assert torch.equal(alone["loss"], metrics["loss"])


ZERO_ONE = torch.tensor([0.0, 1.0])


def test_padding_counts_for_nothing():
    policy = toy.TensorPolicy(torch.tensor(0.3), old=torch.tensor(0.1))
    loss, metrics = algorithm().loss(policy, batch([1.0, -1.0])._replace(weight=ZERO_ONE))
    assert loss.item() == pytest.approx(metrics["loss"][1].item(), rel=1e-6)


def test_samples_without_advantage_are_skipped_unless_a_kl_needs_them():
    found = scores({"a": [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, NAN]})
    assert trained(algorithm(), found).samples.flatten().tolist() == [0, 1, 2, 3]
    under_kl = trained(algorithm(kl_coef=0.1), found)
    assert under_kl.samples.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]
    twice = trained(algorithm(draws_per_sample=2), found)
    assert twice.samples.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_noise_levels_are_uniform_over_the_schedule():
    found = scores({"a": [1.0, 0.0] * 2000}, group_size=2)
    sigma = trained(algorithm(draws_per_sample=5), found).columns["sigma"]
    # 20000 draws of Uniform(0, 1): standard errors 0.002 and, of the variance 1/12, 0.0005
    assert sigma.mean().item() == pytest.approx(0.505, abs=0.01)  # levels 0.01 ... 1.00
    assert sigma.var().item() == pytest.approx(1 / 12, abs=0.003)
    assert sigma.unique().numel() == 100


FAILED_ONCE = {"a": [1.0, 2.0, NAN, 4.0], "b": [0.0, 1.0, 5.0, 2.0]}


def test_a_sample_with_one_failed_reward_is_dropped_or_by_gdpo_trained_on_the_other():
    found = scores(FAILED_ONCE)
    for adv_type in ("grpo", "reinforce_pp"):
        nft = algorithm(adv_type=adv_type)
        assert trained(nft, found).samples.flatten().tolist() == [0, 1, 3]
        assert math.isnan(nft.advantages(found)[2])
    nft = algorithm(adv_type="gdpo")
    assert trained(nft, found).samples.flatten().tolist() == [0, 1, 2, 3]
    advantages = nft.advantages(found)
    # It has the best "b": 3 of mean 2 and std sqrt(14 / 3), and no "a".
    a = [(v - 7 / 3) / (math.sqrt(7 / 3) + 1e-4) for v in (1.0, 2.0, 4.0)]
    b = [(v - 2) / (math.sqrt(14 / 3) + 1e-4) for v in (0.0, 1.0, 5.0, 2.0)]
    sums = np.array([a[0] + b[0], a[1] + b[1], b[2], a[2] + b[3]])
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)
    assert advantages.tolist() == pytest.approx(expected.tolist())
    assert advantages[2] > 0


def test_a_sample_all_of_whose_rewards_failed_never_reaches_a_row():
    found = scores({"a": [1.0, 2.0, NAN, 4.0], "b": [0.0, 1.0, NAN, 2.0]})
    for adv_type in ("grpo", "gdpo", "reinforce_pp"):
        rows = trained(algorithm(adv_type=adv_type, kl_coef=0.1), found)
        assert rows.samples.flatten().tolist() == [0, 1, 3]


def test_gdpo_says_once_that_a_reward_tells_no_two_images_apart(caplog):
    nft = algorithm(adv_type="gdpo")
    found = scores({"a": [1.0, 2.0, 3.0, 4.0], "same": [7.0] * 4})
    for _ in range(2):
        nft.advantages(found)
    (record,) = caplog.records
    assert "reward same scores all images of every prompt the same" in record.getMessage()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"nft_beta": 0.0}, r"train.nft_beta \(0.0\) must be above 0"),
        ({"nft_old_decay": 1.5}, r"train.nft_old_decay \(1.5\) must be in \[0, 1\]"),
        ({"nft_old_ramp": -0.1}, r"train.nft_old_ramp \(-0.1\) at least 0"),
        ({"adv_type": "best"}, r"train.adv_type \('best'\) must be one of grpo, gdpo, reinforce"),
    ],
)
def test_settings_that_could_not_work_are_refused(train, message):
    with pytest.raises(ValueError, match=message):
        algorithm(**train)


def test_the_old_weights_follow_at_once_and_later_slowly():
    nft = algorithm(nft_old_ramp=0.01, nft_old_decay=0.3)
    found = [nft.old_decay(before, before + 10) for before in (0, 10, 20, 30, 1000)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


def test_it_asks_for_the_weights_it_needs():
    assert algorithm().weights == {"old"}
    assert algorithm(kl_coef=0.1).weights == {"old", "reference"}
    assert (algorithm().keeps, algorithm().rollout_weights) == ({"final"}, "old")
