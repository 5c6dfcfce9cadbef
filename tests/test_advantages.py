import numpy as np
import pytest
import torch

from flow_grpo.advantages import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    best_of_group,
    combine_rewards,
    group_advantages,
    group_softmax,
    preference_pairs,
    reinforce_advantages,
    zero_std_groups,
)
from flow_grpo.rewards.base import State

NAN = float("nan")


def test_advantage_is_centred_by_group_and_scaled_by_the_groups_std():
    # Group 0: 1, 3 -> mean 2, population std 1. Group 1: 0, 0, 3 -> mean 1, std sqrt(2).
    advantages = group_advantages([1, 3, 0, 0, 3], [0, 0, 1, 1, 1], epsilon=0.0)
    expected = [-1, 1, -(2**-0.5), -(2**-0.5), 2**0.5]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert advantages.dtype == torch.float64


def test_epsilon_is_added_to_the_std():
    advantages = group_advantages([1, 3], [0, 0], epsilon=0.25)
    assert advantages.tolist() == [-0.8, 0.8]  # 1 / 1.25
    assert group_advantages([1, 3], [0, 0])[1].item() == pytest.approx(1 / 1.0001, abs=1e-12)


def test_global_std_is_over_all_valid_rewards():
    # All: 1, 3, 0, 4 -> mean 2, population variance (1 + 1 + 4 + 4) / 4 = 2.5.
    advantages = group_advantages([1, 3, 0, 4], [0, 0, 1, 1], global_std=True, epsilon=0.0)
    expected = np.array([-1, 1, -2, 2]) / 2.5**0.5
    assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    # Without the last, invalid one: 1, 3, 0 -> mean 4/3, variance (1/9 + 25/9 + 16/9) / 3 = 14/9.
    advantages = group_advantages(
        [1, 3, 0, NAN], [0, 0, 1, 1], valid=[True, True, True, False], global_std=True, epsilon=0.0
    )
    expected = [-1 / (14 / 9) ** 0.5, 1 / (14 / 9) ** 0.5, 0, 0]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)


def test_group_ids_may_come_in_any_order_and_with_gaps():
    rewards = torch.tensor([0.3, 0.9, 0.1, 0.4, 0.8, 0.2, 0.7, 0.6])
    ids = torch.tensor([7, 2, 7, 900, 2, 900, 7, 2])
    advantages = group_advantages(rewards, ids)
    for group in (2, 7, 900):
        own = rewards[ids == group].numpy().astype(np.float64)
        expected = (own - own.mean()) / (own.std() + 1e-4)
        assert advantages[ids == group].tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    order = torch.tensor([4, 0, 7, 2, 6, 1, 5, 3])
    shuffled = group_advantages(rewards[order], ids[order])
    torch.testing.assert_close(shuffled, advantages[order], rtol=0, atol=1e-14)


def test_invalid_samples_get_0_and_do_not_count():
    rewards, ids = [1.0, NAN, 3.0, 50.0], [0, 0, 0, 0]
    advantages = group_advantages(rewards, ids, valid=[True, False, True, False], epsilon=0.0)
    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert group_advantages([NAN, NAN], [0, 0], valid=[False, False]).tolist() == [0.0, 0.0]
    assert group_advantages([NAN, NAN], [0, 0], valid=[False, False], global_std=True).tolist() == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("global_std", [False, True])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 21.3])
def test_a_group_of_equal_rewards_gets_exactly_0(value, global_std):
    for dtype in (np.float32, np.float64):
        rewards = np.array([value] * 7 + [0.0, 1.0], dtype=dtype)
        ids = np.array([0] * 7 + [1, 1])
        advantages = group_advantages(rewards, ids, global_std=global_std)
        assert advantages[:7].tolist() == [0.0] * 7
        assert advantages[8] > 0
    # In float32 the mean of seven 0.7 is not 0.7: a plain formula would give noise / epsilon.


def test_a_group_of_one_gets_0():
    assert group_advantages([5.0, 1.0, 2.0], [0, 1, 1])[0] == 0


def test_advantages_are_clipped():
    rewards = [0.0] * 99 + [1.0]
    free = group_advantages(rewards, [0] * 100)
    clipped = group_advantages(rewards, [0] * 100, clip=5.0)
    assert free[-1] > 9  # 0.99 / sqrt(0.0099)
    assert clipped[-1] == 5.0
    assert torch.equal(clipped[:-1], free[:-1])
    negative = group_advantages([-r for r in rewards], [0] * 100, clip=5.0)
    assert negative[-1] == -5.0


def test_a_valid_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="non-finite"):
        group_advantages([1.0, NAN], [0, 0])
    with pytest.raises(ValueError, match="equal length"):
        group_advantages([1.0, 2.0], [0, 0, 0])


def test_zero_std_groups_is_the_share_of_groups_that_teach_nothing():
    rewards = np.array([0.1, 0.1, 0.0, 1.0, 2.0, 2.0, NAN, 3.0], dtype=np.float32)
    ids = [0, 0, 1, 1, 2, 2, 3, 3]
    valid = [True] * 6 + [False, True]
    assert zero_std_groups(rewards, ids, valid) == 0.75  # only group 1 differs
    assert zero_std_groups([0.0, 1.0], [0, 0]) == 0.0


def test_reinforce_scales_by_all_valid_rewards():
    # 1, 3, 0, 4 -> mean 2, population variance (1 + 1 + 4 + 4) / 4 = 2.5; no groups.
    advantages = reinforce_advantages([1, 3, 0, 4], epsilon=0.0)
    assert advantages.tolist() == pytest.approx([-(2.5**-0.5), 2.5**-0.5, -(1.6**0.5), 1.6**0.5])
    assert advantages.dtype == torch.float64
    # A failed one: 1, 5 -> mean 3, std 2, epsilon 0.5 more.
    valid = [True, False, True, False]
    advantages = reinforce_advantages([1, NAN, 5, 9], valid=valid, epsilon=0.5)
    assert advantages.tolist() == [-0.8, 0.0, 0.8, 0.0]
    # 99 zeros and a one: 0.99 / sqrt(0.0099) = 9.9.
    assert reinforce_advantages([0.0] * 99 + [1.0], clip=5.0)[-1] == 5.0
    assert reinforce_advantages([0.0] * 99 + [-1.0], clip=5.0)[-1] == -5.0


def test_reinforce_gives_equal_rewards_exactly_0():
    for dtype in (np.float32, np.float64):
        for count in (1, 7):
            rewards = np.array([0.7] * count + [NAN], dtype=dtype)
            valid = [True] * count + [False]
            assert not reinforce_advantages(rewards, valid=valid, epsilon=0.0).any()
    assert reinforce_advantages([NAN, NAN], valid=[False, False]).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="non-finite"):
        reinforce_advantages([1.0, NAN])
    with pytest.raises(ValueError, match="equal length"):
        reinforce_advantages([1.0, 2.0], valid=[True])


def test_best_of_group_marks_every_maximum_among_unequal_rewards():
    rewards = [1.0, 5.0, 5.0, NAN, 2.0, 2.0, 9.0, -1.0, -3.0]
    ids = [7, 7, 7, 7, 3, 3, 3, 0, 0]
    valid = [True] * 3 + [False] + [True] * 2 + [False] + [True] * 2
    # Group 7: two at 5. Group 3: 2 = 2, its 9 failed. Group 0: -1.
    expected = [0, 1, 1, 0, 0, 0, 0, 1, 0]
    best = best_of_group(rewards, ids, valid=valid)
    assert best.dtype == torch.float64
    assert best.tolist() == expected
    assert best_of_group([4.0], [0]).tolist() == [0.0]
    # A failed sample is none of the best, even where 0 stands for its score and 0 is the maximum.
    assert best_of_group([NAN, -2.0, 0.0], [0] * 3, valid=[False, True, True]).tolist() == [
        0.0,
        0.0,
        1.0,
    ]


def test_group_softmax_is_the_softmax_times_the_number_of_valid_members():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    ids = torch.randint(5, (40,), generator=generator)
    valid = torch.rand(40, generator=generator) > 0.3
    for temperature in (0.2, 1.0, 3.0):
        weights = group_softmax(
            torch.where(valid, rewards, NAN), ids, temperature=temperature, valid=valid
        )
        assert not weights[~valid].any()
        for group in range(5):
            own = valid & (ids == group)
            expected = torch.softmax(rewards[own] / temperature, 0) * own.sum()
            torch.testing.assert_close(weights[own], expected, rtol=1e-12, atol=0)


def test_group_softmax_of_equal_rewards_is_0_and_of_large_ones_finite():
    assert group_softmax([0.7, 0.7, 5.0], [0, 0, 1], temperature=1.0).tolist() == [0.0, 0.0, 0.0]
    invalid = group_softmax([NAN, NAN, 1.0], [0, 0, 1], temperature=1.0, valid=[False, False, True])
    assert invalid.tolist() == [0.0, 0.0, 0.0]
    assert group_softmax([1e6, -1e6, 1e6], [0] * 3, temperature=0.1).tolist() == [1.5, 0.0, 1.5]
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"temperature is .*; it must be positive"):
            group_softmax([1.0], [0], temperature=temperature)


def test_preference_pairs_are_the_first_best_and_the_first_worst_of_a_group():
    #          group 8 ........  group 2: equal  group 5 ...............  group 1: one valid
    rewards = [3.0, 1.0, 3.0, 1.0, 0.7, 0.7, -2.0, NAN, -1.0, -4.0, -4.0, 6.0, NAN]
    ids = [8, 8, 8, 8, 2, 2, 5, 5, 5, 5, 5, 1, 1]
    valid = np.isfinite(rewards)
    winners, losers = preference_pairs(rewards, ids, valid=valid)
    assert winners.dtype == losers.dtype == torch.int64
    assert winners.tolist() == [8, 0]  # -1 in group 5, then the first 3 in group 8
    assert losers.tolist() == [9, 1]  # the first -4, the first 1
    assert [list(p) for p in preference_pairs([1.0, 1.0], [0, 0])] == [[], []]
    assert [list(p) for p in preference_pairs([NAN, 1.0], [0, 0], valid=[False, True])] == [[], []]
    assert [list(p) for p in preference_pairs([], [])] == [[], []]


def test_preference_pairs_agree_with_a_search():
    generator = np.random.default_rng(3)
    rewards, ids = generator.integers(4, size=60) / 7, generator.integers(20, size=60)
    valid = generator.random(60) > 0.3
    expected = []
    for group in range(20):
        own = [i for i in range(60) if ids[i] == group and valid[i]]
        if len({rewards[i] for i in own}) > 1:
            expected.append(
                (max(own, key=lambda i: rewards[i]), min(own, key=lambda i: rewards[i]))
            )
    winners, losers = preference_pairs(np.where(valid, rewards, NAN), ids, valid=valid)
    assert list(zip(winners.tolist(), losers.tolist())) == expected
    assert 5 < len(expected) < 20


def combine(values, weights, states):
    return combine_rewards(
        {name: np.array(v, dtype=np.float32) for name, v in values.items()},
        {name: np.array(w) for name, w in weights.items()},
        {name: np.array(s, dtype=np.uint8) for name, s in states.items()},
    )


def test_total_is_the_weighted_sum_per_sample():
    total, valid = combine(
        {"ocr": [0.5, 1.0], "jpeg": [2.0, 4.0]},
        {"ocr": [0.8, 0.5], "jpeg": [0.25, 0.0]},
        {"ocr": [0, 0], "jpeg": [0, 0]},
    )
    assert total.tolist() == pytest.approx([0.9, 0.5])  # 0.4 + 0.5; 0.5 + 0
    assert total.dtype == torch.float64
    assert valid.tolist() == [True, True]


def test_a_score_that_does_not_apply_adds_nothing_and_a_failed_one_drops_the_sample():
    total, valid = combine(
        {"ocr": [NAN, NAN, 0.5, NAN, 0.5], "jpeg": [2.0, 2.0, NAN, NAN, NAN]},
        {"ocr": [1.0] * 5, "jpeg": [1.0, 1.0, 1.0, 1.0, 0.0]},
        {"ocr": [1, 2, 0, 1, 0], "jpeg": [0, 0, 2, 1, 2]},
    )
    # jpeg alone; ocr failed; jpeg failed; none applies; jpeg failed, but has no weight.
    assert valid.tolist() == [True, False, False, False, True]
    assert total[valid].tolist() == [2.0, 0.5]
    assert total[~valid].isnan().all()


def test_a_reward_without_a_weight_is_only_logged():
    total, valid = combine({"ocr": [0.5], "jpeg": [NAN]}, {"ocr": [1.0]}, {"ocr": [0], "jpeg": [2]})
    assert total.tolist() == [0.5]
    assert valid.tolist() == [True]


def test_inconsistent_scores_are_refused():
    with pytest.raises(ValueError, match=r"\['ocr'\] have a weight but no scores"):
        combine({"jpeg": [1.0]}, {"ocr": [1.0]}, {"jpeg": [0]})
    with pytest.raises(ValueError, match="'ocr' has non-finite scores"):
        combine({"ocr": [NAN]}, {"ocr": [1.0]}, {"ocr": [0]})
    with pytest.raises(ValueError, match="no reward"):
        combine({}, {}, {})


def test_the_states_are_those_that_rewards_report():
    assert {state.name: state.value for state in State} == {
        "OK": OK,
        "NOT_APPLICABLE": NOT_APPLICABLE,
        "FAILED": FAILED,
    }
