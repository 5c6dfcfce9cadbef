"""What holds for every reward: the tests run once for each file of the folder."""

import pickle
from pathlib import Path

import pytest
import torch

from flow_grpo import registry
from flow_grpo.rewards.base import Samples, Scores, State, checked

PACKAGE = "flow_grpo.rewards"
NAMES = registry.names(PACKAGE)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(params=NAMES, scope="module")
def reward(request, tiny_clip_dir, monkeypatch_module):
    monkeypatch_module.setenv("FLOW_GRPO_CLIP", tiny_clip_dir)
    return registry.load(PACKAGE, request.param)(device="cpu")


def samples(num):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num, 3, 64, 64, generator=generator)
    prompts = [f'"WORD{i}" on a sign' for i in range(num)]
    references = [(torch.rand(3, 40 + i, 50, generator=generator),) for i in range(num)]
    return Samples(images, prompts, [{"tag": "single_object"} for _ in range(num)], references)


def assert_equal(left: Scores, right: Scores):
    torch.testing.assert_close(left.values, right.values, rtol=0, atol=0, equal_nan=True)
    assert left.states.tolist() == right.states.tolist()
    assert left.reasons == right.reasons


def test_every_reward_has_a_test_of_its_own():
    tests = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert {f"test_{name}" for name in NAMES} - tests == set()


def test_it_says_how_it_is_called(reward):
    assert reward.scope in ("sample", "group")
    assert reward.runs in ("inline", "thread", "process")
    assert reward.device == "cpu"


def test_it_can_be_named_to_another_process(reward):
    assert pickle.loads(pickle.dumps(type(reward))) is type(reward)


def test_its_answer_is_well_formed(reward):
    scores = reward(samples(3))
    assert scores.values.dtype == torch.float32
    assert scores.states.dtype == torch.uint8
    assert_equal(checked(scores, 3), scores)  # nothing to mend
    for state, reason in zip(scores.states, scores.reasons, strict=True):
        assert (state == State.OK) == (reason == "")
    assert all(detail.shape == (3,) for detail in scores.details.values())


def test_it_is_deterministic(reward):
    assert_equal(reward(samples(2)), reward(samples(2)))


def test_a_sample_scores_the_same_in_any_batch(reward):
    if reward.scope == "group":
        pytest.skip("a group is scored as a whole")
    given = samples(3)
    whole = reward(given)
    first = reward(Samples(*(column[:1] for column in given[:4])))
    assert_equal(Scores(whole.values[:1], whole.states[:1], whole.reasons[:1], {}), first)


def test_it_leaves_its_input_alone(reward):
    given, expected = samples(2), samples(2)
    reward(given)
    torch.testing.assert_close(given.images, expected.images, rtol=0, atol=0)
    for own, same in zip(given.reference_images, expected.reference_images, strict=True):
        torch.testing.assert_close(own, same, rtol=0, atol=0)
    assert given.prompts == expected.prompts
    assert given.metadata == expected.metadata


def test_only_a_reward_that_says_so_needs_a_reference(reward):
    for missing in (None, [(), ()]):
        scores = reward(samples(2)._replace(reference_images=missing))
        if getattr(reward, "needs_reference", False):
            assert scores.states.tolist() == [State.NOT_APPLICABLE] * 2
            assert "no reference image" in scores.reasons[1]
        else:
            assert State.OK in scores.states.tolist()


def test_no_samples_give_no_scores(reward):
    assert reward(samples(0)).values.shape == (0,)


def test_a_broken_image_fails_alone(reward):
    given = samples(3)
    given.images[1, 0, 5, 5] = torch.nan
    scores = reward(given)
    assert scores.states[1] == State.FAILED
    assert "not finite" in scores.reasons[1]
    assert State.FAILED not in scores.states[[0, 2]].tolist()


def test_wrong_channels_fail_with_the_shape(reward):
    scores = reward(samples(2)._replace(images=torch.rand(2, 1, 64, 64)))
    assert scores.states.tolist() == [State.FAILED] * 2
    assert "shape (1, 64, 64), but (3, h, w) is needed" in scores.reasons[0]


@pytest.mark.parametrize(
    "prompt", ["", "no quotes", '"', '""', '"  "', '"\u00e9\u4e2d"', "\0", "a" * 5000]
)
def test_no_prompt_crashes_it(reward, prompt):
    scores = reward(samples(1)._replace(prompts=[prompt]))
    assert scores.states.item() in (State.OK, State.NOT_APPLICABLE)


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (64, 640), (33, 47)])
def test_no_image_size_crashes_it(reward, size):
    scores = reward(samples(1)._replace(images=torch.rand(1, 3, *size)))
    assert scores.states.item() == State.OK
