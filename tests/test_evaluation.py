"""Held-out scores: each prompt once, averaged weights, the same seeds every time, no noise."""

import math

import pytest
import torch

from flow_grpo import evaluation
from flow_grpo.rewards.base import State


@pytest.fixture
def run(tiny_config, make_run):
    """Return a run of 5 held-out prompts in batches of 2, so that the last batch is padded."""
    tiny_config.reward_fn = {"odd_rewards:Contrast": 1.0, "jpeg_compressibility": 0.0}
    tiny_config.eval.num_prompts, tiny_config.eval.batch_size = 5, 2
    tiny_config.eval.num_samples = 3
    return make_run(tiny_config)


@pytest.fixture
def submitted(run, monkeypatch):
    """Return the list of all samples that are handed to the rewards."""
    seen, submit = [], run.rewards.submit

    def keep(samples, **names):
        seen.append(samples)
        return submit(samples, **names)

    monkeypatch.setattr(run.rewards, "submit", keep)
    return seen


def move(run) -> None:
    """Change the current weights, and leave the average."""
    run.policy.assign([p + 0.5 for p in run.policy.parameters])


def test_every_prompt_counts_once(run, submitted):
    done = []
    metrics, _ = evaluation.evaluate(run, done.append)
    prompts = [prompt for samples in submitted for prompt in samples.prompts]
    assert prompts == [p.prompt for p in run.eval_prompts]
    assert sum(done) == len(prompts) == 5
    images = torch.cat([samples.images for samples in submitted])
    by_hand = 100 * images.flatten(1).double().std(1)
    assert metrics["eval/odd_rewards"] == pytest.approx(by_hand.mean().item(), rel=1e-6)
    assert metrics["eval/odd_rewards_stderr"] == pytest.approx(by_hand.std().item() / 5**0.5)
    assert metrics["eval/total"] == metrics["eval/odd_rewards"]  # the other has weight 0
    assert metrics["eval/jpeg_compressibility"] < 0  # and is scored here all the same


def test_the_first_images_are_kept_with_their_scores(run, submitted):
    _, kept = evaluation.evaluate(run, lambda number: None)
    assert kept["prompts"] == [p.prompt for p in run.eval_prompts[:3]]
    assert torch.equal(kept["images"], torch.cat([s.images for s in submitted])[:3])
    by_hand = 100 * kept["images"].flatten(1).double().std(1)
    assert kept["scores"]["odd_rewards"] == pytest.approx(by_hand.tolist(), rel=1e-6)
    assert set(kept["scores"]) == {"odd_rewards", "jpeg_compressibility"}


def test_the_same_weights_give_the_same_images_whatever_was_drawn_between(run, submitted):
    first, _ = evaluation.evaluate(run, lambda number: None)
    torch.randn(100)
    run.state.epoch, run.state.update = 7, 14
    second, _ = evaluation.evaluate(run, lambda number: None)
    assert first == second
    half = len(submitted) // 2
    for one, two in zip(submitted[:half], submitted[half:], strict=True):
        assert torch.equal(one.images, two.images)


def test_prompts_have_noise_of_their_own_that_no_batch_changes(run, submitted):
    evaluation.evaluate(run, lambda number: None)
    images = torch.cat([samples.images for samples in submitted])
    assert len({image.numpy().tobytes() for image in images}) == 5
    submitted.clear()
    run.config.eval.batch_size = 5
    evaluation.evaluate(run, lambda number: None)
    # Another batch shape, so float32 rounding.
    torch.testing.assert_close(submitted[0].images, images, rtol=0, atol=1e-5)


def test_the_average_is_evaluated_and_the_current_weights_come_back(run, submitted):
    before, _ = evaluation.evaluate(run, lambda number: None)
    move(run)
    current = [p.detach().clone() for p in run.policy.parameters]
    after, _ = evaluation.evaluate(run, lambda number: None)
    assert after == before  # the average has not moved
    for kept, parameter in zip(current, run.policy.parameters, strict=True):
        assert torch.equal(kept, parameter)
    run.policy.ema = None
    moved, _ = evaluation.evaluate(run, lambda number: None)
    assert moved["eval/odd_rewards"] != before["eval/odd_rewards"]


def test_means_are_over_the_samples_that_a_reward_applies_to():
    values = {
        "a": torch.tensor([1.0, 3.0, math.nan, math.nan], dtype=torch.float64),
        "b": torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64),
    }
    states = {
        "a": torch.tensor([State.OK, State.OK, State.NOT_APPLICABLE, State.FAILED]),
        "b": torch.zeros(4, dtype=torch.uint8),
    }
    metrics = evaluation.summarise(values, states, {"a": 1.0, "b": 2.0}, prefix="eval/")
    assert metrics["eval/a"] == 2.0
    assert metrics["eval/a_stderr"] == pytest.approx(math.sqrt(2) / math.sqrt(2))  # std / sqrt(2)
    assert metrics["eval/b"] == 0.5
    assert metrics["eval/total"] == pytest.approx((2 + 4 + 1) / 3)  # the failed one is dropped
    assert metrics["failed/eval"] == 1


def test_nothing_is_claimed_where_nothing_could_be_scored():
    values = {"a": torch.full((2,), math.nan, dtype=torch.float64)}
    states = {"a": torch.full((2,), int(State.FAILED))}
    metrics = evaluation.summarise(values, states, {"a": 1.0}, prefix="eval/")
    assert metrics == {"failed/eval": 2}
