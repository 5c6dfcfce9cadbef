"""Which advantages `train.adv_type` gives, and what they say of samples without a reward."""

import json
import logging
import math

import pytest
import torch

from config.base import locked_config
from flow_grpo.algorithms._advantage_types import Advantages
from flow_grpo.algorithms.base import Scores
from flow_grpo.rewards.base import State


def settings(adv_type, *, clip=5.0, global_std=True):
    config = locked_config()
    config.train.adv_type, config.train.adv_clip_max = adv_type, clip
    config.sample.global_std = global_std
    return config


def scores(values: dict[str, list[float]], states: dict[str, list[int]] | None = None) -> Scores:
    """Return the scores of groups of two, all of weight 1."""
    values = {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}
    ok = {name: [0] * len(v) for name, v in values.items()}
    states = {n: torch.tensor(s, dtype=torch.uint8) for n, s in (ok | (states or {})).items()}
    total, valid = sum(values.values()), torch.ones(len(next(iter(values.values()))), dtype=bool)
    for state in states.values():
        valid &= state == State.OK
    weights = {name: torch.ones_like(total) for name in values}
    return Scores(values, weights, states, total, valid, torch.arange(len(total)) // 2)


FOUR = {"r": [0.0, 2.0, 1.0, 5.0]}  # mean 2, variance (4 + 0 + 1 + 9) / 4 = 3.5


@pytest.mark.parametrize(
    ("adv_type", "global_std", "expected"),
    [
        ("grpo", False, [-1, 1, -1, 1]),
        ("grpo", True, [x / math.sqrt(3.5) for x in (-1, 1, -2, 2)]),
        ("reinforce_pp", True, [x / math.sqrt(3.5) for x in (-2, 0, -1, 3)]),
        # Each group gives -+1/sqrt(2) with the sample std; of mean 0 and std sqrt(2/3) over four.
        ("gdpo", True, [x / math.sqrt(2) / math.sqrt(2 / 3) for x in (-1, 1, -1, 1)]),
    ],
)
def test_each_type_scales_as_it_says(adv_type, global_std, expected):
    found = Advantages(settings(adv_type, global_std=global_std))(scores(FOUR))
    assert found.tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("adv_type", ["grpo", "gdpo", "reinforce_pp"])
def test_advantages_are_clipped_and_failures_are_marked(adv_type):
    failed = scores({"r": [0.0, 2.0, math.nan, 4.0]}, {"r": [0, 0, 2, 0]})
    found = Advantages(settings(adv_type, clip=0.25))(failed)
    assert found.isnan().tolist() == [False, False, True, False]
    assert found[[0, 1, 3]].abs().max() <= 0.25
    assert found[0] == -0.25


def test_gdpo_keeps_a_sample_of_which_one_reward_failed():
    mixed = scores({"a": [0.0, 2.0, 1.0, 3.0], "b": [1.0, math.nan, 5.0, 6.0]}, {"b": [0, 2, 0, 0]})
    assert not mixed.valid[1]
    found = Advantages(settings("gdpo"))(mixed)
    assert found.isfinite().all()
    assert found[1] > 0  # by `a` alone


def test_gdpo_says_once_that_a_reward_is_the_same_everywhere(caplog):
    same = scores({"a": [0.0, 2.0, 1.0, 3.0], "flat": [1.0, 1.0, 5.0, 5.0]})
    estimate = Advantages(settings("gdpo"))
    with caplog.at_level(logging.WARNING):
        estimate(same)
        estimate(same)
    (record,) = caplog.records
    assert "reward flat scores all images of every prompt the same" in record.getMessage()


def test_an_unknown_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"train.adv_type \('gpo'\) must be one of grpo, gdpo, re"):
        Advantages(settings("gpo"))


@pytest.mark.parametrize(("adv_type", "code"), [("gdpo", 0), ("grpo", 1)])
def test_gdpo_alone_goes_on_while_one_of_two_rewards_fails_everywhere(
    tiny_arguments, train, tmp_path, adv_type, code
):
    outcome = train(
        *tiny_arguments, f"--config.train.adv_type={adv_type}",
        "--config.reward_fn=jpeg_compressibility:1.0,odd_rewards:NanForAll:1.0",
    )  # fmt: skip
    assert outcome.code == code
    if code:
        assert "no sample of epoch 0 has a reward; reasons: returned nan" in outcome.error
        return
    text = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    epochs = [line for line in map(json.loads, text.splitlines()) if "images" in line]
    assert [line["train/grad_norm"] > 0 for line in epochs] == [True, True]
    assert "2 epochs, 32 images" in outcome.out
