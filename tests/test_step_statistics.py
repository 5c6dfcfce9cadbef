"""Per-step statistics of the ratio, by hand and from an epoch of the trainer."""

import math
from types import SimpleNamespace

import pytest
import torch
import toy

from flow_grpo.step_statistics import StepStatistics

ONE_RANK = SimpleNamespace(reduce=lambda tensor, reduction: tensor)


def rows(statistics, step, advantage, log_ratio, clipped, weight=None):
    num = len(step)
    metrics = {"log_ratio": torch.tensor(log_ratio), "clipped": torch.tensor(clipped)}
    weight = torch.tensor(weight or [1.0] * num)
    statistics.add(torch.tensor(step), torch.tensor(advantage), weight, metrics)


def first_batch(statistics):
    rows(statistics, [0, 0, 1], [1.0, -1.0, 2.0], [0.1, 0.3, -0.2], [1.0, 0.0, 0.0])


def second_batch(statistics):
    """Add two rows and two of padding."""
    rows(
        statistics, [0, 1, 1, 1], [3.0, 1.0, -9.0, 0.5], [-0.1, 0.2, 9.0, 9.0],
        [0.0, 1.0, 1.0, 1.0], weight=[1.0, 1.0, 0.0, 0.0],
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_means_spreads_and_clipped_shares_are_those_of_the_rows_of_all_ranks(world_size):
    one, other = StepStatistics(3, "cpu"), StepStatistics(3, "cpu")
    first_batch(one)
    second_batch(one if world_size == 1 else other)
    gathered = []
    other.metrics(SimpleNamespace(reduce=lambda t, _: gathered.append(t) or t), (2, 5, 7))
    ranks = SimpleNamespace(reduce=lambda tensor, reduction: tensor + gathered[0])
    found = one.metrics(ranks, (2, 5, 7))
    assert found == pytest.approx({
        "train/step_2/log_ratio_mean": 0.1,
        "train/step_2/log_ratio_std": math.sqrt((0.0 + 0.04 + 0.04) / 3),
        "train/step_2/clip_positive": 1 / 2,
        "train/step_2/clip_negative": 0.0,
        "train/step_5/log_ratio_mean": 0.0,
        "train/step_5/log_ratio_std": 0.2,
        "train/step_5/clip_positive": 1 / 2,
        "train/clip_positive": 2 / 4,  # of all steps together
        "train/clip_negative": 0.0,
    }, abs=1e-7)  # no row of negative advantage at step 5, none at all at step 7  # fmt: skip


def test_equal_log_ratios_have_no_spread():
    found = StepStatistics(1, "cpu")
    rows(found, [0] * 3, [0.0] * 3, [0.1] * 3, [0.0] * 3)
    metrics = found.metrics(ONE_RANK, (0,))
    assert metrics == pytest.approx(
        {"train/step_0/log_ratio_mean": 0.1, "train/step_0/log_ratio_std": 0.0}, abs=1e-7
    )


@pytest.mark.parametrize("algorithm", ["grpo", "grpo_guard"])
def test_an_epoch_reports_its_trained_steps_after_its_first_update(tmp_path, algorithm):
    settings = {
        "sample__sde_window_size": 2, "sample__sde_window_range": (1, 3),
        "train__clip_range": 1e-4, "train__updates_per_epoch": 3,
    }  # fmt: skip
    run = toy.build(toy.config(tmp_path, algorithm, **settings))
    metrics = toy.train_epoch(run)
    run.rewards.close()
    steps = {key.split("/")[1] for key in metrics if key.startswith("train/step_")}
    assert steps == {"step_1", "step_2"}
    for step in steps:
        assert metrics[f"train/{step}/log_ratio_std"] > 0
        # The range is far smaller than the steps taken, so much of it is clipped.
        assert 0 < metrics[f"train/{step}/clip_positive"] <= 1
        assert 0 < metrics[f"train/{step}/clip_negative"] <= 1
    assert "train/log_ratio" not in metrics
    assert "train/clipped" not in metrics


def test_an_epoch_of_one_update_is_on_policy_and_has_none(tmp_path):
    run = toy.build(toy.config(tmp_path, train__updates_per_epoch=1))
    metrics = toy.train_epoch(run)
    run.rewards.close()
    assert metrics["train/ratio_dev_first"] == 0.0
    assert [key for key in metrics if key.startswith("train/step_")] == []


def test_grpo_s_ratio_drifts_below_1_by_its_noise_and_guards_does_not(tmp_path):
    # 1536 samples in two updates of one step. In the second the mean has moved z std: GRPO's
    # log-ratio has mean -z^2 / 2 and spread z / sqrt(2 elements). A mean's error is spread / 27.
    found = {}
    for algorithm in ("grpo", "grpo_guard"):
        run = toy.build(toy.config(
            tmp_path, algorithm, sample__groups_per_epoch=128, train__learning_rate=0.3,
            sample__sde_window_size=1, sample__sde_window_range=(4, 5), train__clip_range=0.9,
        ))  # fmt: skip
        metrics = toy.train_epoch(run)
        run.rewards.close()
        found[algorithm] = [metrics[f"train/step_4/log_ratio_{name}"] for name in ("mean", "std")]
    mean, std = found["grpo"]
    assert mean == pytest.approx(-(std**2), rel=0.25)
    assert mean < -5 * std / 27
    mean, std = found["grpo_guard"]
    assert abs(mean) < 4 * std / 27
