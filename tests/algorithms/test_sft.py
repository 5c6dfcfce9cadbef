"""SFT's rows, weights and loss by hand."""

import math

import pytest
import torch
import toy

from config.base import locked_config
from flow_grpo.algorithms.base import Scores
from flow_grpo.algorithms.sft import Sft

NAN = math.nan


def algorithm(**train) -> Sft:
    config = locked_config()
    for name, value in train.items():
        config.train[name] = value
    return Sft(config)


def scores(total, group_size=4) -> Scores:
    total = torch.tensor(total, dtype=torch.float64)
    valid = total.isfinite()
    states = {"r": torch.where(valid, 0, 2).to(torch.uint8)}
    groups = torch.arange(len(total)) // group_size
    return Scores({"r": total}, {"r": torch.ones_like(total)}, states, total, valid, groups)


def rows(found: Scores, **train):
    sft = algorithm(**train)
    return sft.rows(
        sft.advantages(found), found, num_steps=0, sigmas=torch.linspace(1, 0.1, 10),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def batch(weights, seed=0):
    """Return one image a weight."""
    num = len(weights)
    x_0, noise = torch.randn(2, num, *toy.SHAPE, generator=torch.Generator().manual_seed(seed))
    return toy.row_batch(
        weights, kept={"final": x_0}, noise=noise, sigma=torch.linspace(0.2, 0.8, num)
    )


def test_only_the_best_of_a_group_is_trained_and_under_a_kl_all_that_are_valid():
    found = scores([1.0, 3.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0, NAN, 7.0, 8.0, NAN])
    assert rows(found).samples.flatten().tolist() == [1, 3, 10]
    under_kl = rows(found, kl_coef=0.1).samples.flatten().tolist()
    assert under_kl == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    weights = algorithm().advantages(found).nan_to_num(9).tolist()
    assert weights == [0, 1, 0, 1, 0, 0, 0, 0, 9, 0, 1, 9]


def test_every_image_is_noised_as_often_as_asked():
    picked = rows(scores([1.0, 3.0, 2.0, 0.0]), draws_per_sample=3)
    assert picked.samples.tolist() == [[1]] * 3
    assert picked.columns["draw"].tolist() == [0, 1, 2]
    assert set(picked.columns["sigma"].tolist()) <= set(torch.linspace(1, 0.1, 10).tolist())


def test_the_loss_is_the_weighted_flow_matching_error():
    policy, found = toy.TensorPolicy(torch.tensor(0.3)), batch([1.0, 0.0, 2.5])
    loss, metrics = algorithm().loss(policy, found)
    target = found.noise - found.kept["final"]
    errors = [((0.3 - each) ** 2).mean().item() for each in target]
    assert metrics["flow_matching"].tolist() == pytest.approx(errors, rel=1e-5)
    assert loss.item() == pytest.approx(errors[0] + 2.5 * errors[2], rel=1e-5)
    loss.backward()
    # d mean (v - target)^2 / dv = 2 mean(v - target)
    slopes = [2 * (0.3 - each).mean().item() for each in target]
    assert policy.current.grad.item() == pytest.approx(slopes[0] + 2.5 * slopes[2], rel=1e-5)


def test_a_weight_of_0_without_a_kl_teaches_nothing():
    policy = toy.TensorPolicy(torch.tensor(0.3))
    algorithm().loss(policy, batch([0.0, 0.0]))[0].backward()
    assert policy.current.grad.item() == 0.0


def test_the_kl_is_the_velocities_and_counts_for_images_of_weight_0_too():
    policy = toy.TensorPolicy(torch.tensor(0.3), reference=torch.tensor(0.1))
    loss, metrics = algorithm(kl_coef=0.5).loss(policy, batch([0.0, 0.0]))
    loss.backward()
    assert metrics["kl"].tolist() == pytest.approx([0.2**2] * 2, rel=1e-5)
    assert loss.item() == pytest.approx(2 * 0.5 * 0.2**2, rel=1e-5)
    assert policy.current.grad.item() == pytest.approx(2 * 0.5 * 2 * 0.2, rel=1e-5)


def test_it_asks_for_the_weights_it_needs():
    assert algorithm().weights == {"old"}
    assert algorithm(kl_coef=0.1).weights == {"old", "reference"}
    assert (algorithm().keeps, algorithm().rollout_weights) == ({"final"}, "old")


def test_online_weights_are_renewed_by_multiples_of_the_frequency():
    online = algorithm(old_update_freq=2)
    assert [online.old_decay(u, u + 1) for u in range(6)] == [1, 0, 1, 0, 1, 0]
    assert {algorithm().old_decay(u, u + 1) for u in range(50)} == {1.0}
