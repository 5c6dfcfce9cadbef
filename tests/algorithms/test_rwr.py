"""RWR is SFT with the softmax of a group's rewards for weights."""

import math

import pytest
import torch
import toy

from config.base import locked_config
from flow_grpo.algorithms.base import Scores
from flow_grpo.algorithms.rwr import Rwr

NAN = math.nan


def algorithm(**train) -> Rwr:
    config = locked_config()
    for name, value in train.items():
        config.train[name] = value
    return Rwr(config)


def scores(total) -> Scores:
    """Return groups of three."""
    total = torch.tensor(total, dtype=torch.float64)
    valid = total.isfinite()
    states = {"r": torch.where(valid, 0, 2).to(torch.uint8)}
    groups = torch.arange(len(total)) // 3
    return Scores({"r": total}, {"r": torch.ones_like(total)}, states, total, valid, groups)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_weights_are_the_softmax_of_a_group_scaled_to_a_mean_of_1(temperature):
    found = scores([1.0, 2.0, 0.5, 3.0, 3.0, 3.0, NAN, 0.0, 1.0])
    weights = algorithm(rwr_temperature=temperature).advantages(found)
    powers = [math.exp(r / temperature) for r in (1.0, 2.0, 0.5)]
    assert weights[:3].tolist() == pytest.approx([3 * p / sum(powers) for p in powers])
    assert weights[3:6].tolist() == [0.0] * 3  # equal rewards teach nothing
    powers = [math.exp(r / temperature) for r in (0.0, 1.0)]
    assert math.isnan(weights[6])
    assert weights[7:].tolist() == pytest.approx([2 * p / sum(powers) for p in powers])


def test_rows_are_all_valid_images_of_groups_that_teach():
    found = scores([1.0, 2.0, 0.5, 3.0, 3.0, 3.0, NAN, 0.0, 1.0])
    for kl_coef, expected in ((0.0, [0, 1, 2, 7, 8]), (0.1, [0, 1, 2, 3, 4, 5, 7, 8])):
        rwr = algorithm(kl_coef=kl_coef)
        rows = rwr.rows(
            rwr.advantages(found), found, num_steps=0, sigmas=torch.linspace(1, 0.1, 10),
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert rows.samples.flatten().tolist() == expected


def test_the_loss_weighs_flow_matching_errors():
    weights = [0.5, 2.0]
    x_0, noise = torch.randn(2, 2, *toy.SHAPE, generator=torch.Generator().manual_seed(0))
    batch = toy.row_batch(weights, kept={"final": x_0}, noise=noise)
    policy = toy.TensorPolicy(torch.tensor(0.3))
    loss, _ = algorithm().loss(policy, batch)
    errors = [((0.3 - each) ** 2).mean().item() for each in noise - x_0]
    assert loss.item() == pytest.approx(0.5 * errors[0] + 2.0 * errors[1], rel=1e-5)


def test_a_temperature_of_0_is_refused():
    with pytest.raises(
        ValueError, match=r"train.rwr_temperature \(0.0\) must be finite and above 0"
    ):
        algorithm(rwr_temperature=0.0)


def test_it_renews_its_old_weights_as_sft_does():
    online = algorithm(old_update_freq=3)
    assert [online.old_decay(u, u + 1) for u in range(6)] == [1, 1, 0, 1, 1, 0]
    assert algorithm().old_decay(0, 10) == 1.0
    assert algorithm(kl_coef=0.1).weights == {"old", "reference"}
