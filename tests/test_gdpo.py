import numpy as np
import pytest
import torch

from flow_grpo.advantages import FAILED, NOT_APPLICABLE, OK, gdpo_advantages, zero_variance_rewards

NAN = float("nan")


def test_rewards_are_scaled_by_themselves_then_weighed_added_and_scaled_over_all():
    # Group 0: ocr 0, 1, 2 -> mean 1, std 1; jpeg 0, 0, 3 -> mean 1, variance (1 + 1 + 4) / 2 = 3.
    # Group 1: ocr 5, 7 -> mean 6, variance (1 + 1) / 1 = 2; jpeg 4, 4 -> 0.
    advantages, valid = gdpo_advantages(
        {"ocr": [0, 1, 2, 5, 7], "jpeg": [0, 0, 3, 4, 4]},
        {"ocr": [1, 1, 1, 0.5, 0.5], "jpeg": [2, 2, 2, 1, 1]},
        {"ocr": [OK] * 5, "jpeg": [OK] * 5},
        [0, 0, 0, 1, 1],
        epsilon=0.0,
    )
    total = np.array([-1 - 2 / 3**0.5, -2 / 3**0.5, 1 + 4 / 3**0.5, -0.5 / 2**0.5, 0.5 / 2**0.5])
    # They sum to 0; std over all five with n - 1 = 4.
    expected = total / (np.square(total).sum() / 4) ** 0.5
    assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
    assert advantages.dtype == torch.float64
    assert valid.tolist() == [True] * 5


def test_a_failed_and_an_inapplicable_score_leave_their_rewards_statistics():
    # ocr counts for samples 0 and 1: (0, 2) -> -1, 1 over sqrt(2). jpeg, weight 3, for 0 and 2:
    # (1, 4) -> -1, 1 over sqrt(2). Sample 3: ocr is not applicable, jpeg has no weight.
    advantages, valid = gdpo_advantages(
        {"ocr": [0, 2, NAN, NAN], "jpeg": [1, NAN, 4, 100]},
        {"ocr": [1, 1, 1, 1], "jpeg": [3, 3, 3, 0]},
        {"ocr": [OK, OK, FAILED, NOT_APPLICABLE], "jpeg": [OK, FAILED, OK, OK]},
        [0, 0, 0, 0],
        epsilon=0.0,
    )
    # -4, 1, 3 over sqrt(2): mean 0, std sqrt((16 + 1 + 9) / 2) = sqrt(13) over sqrt(2).
    assert advantages.tolist() == pytest.approx([-4 / 13**0.5, 13**-0.5, 3 / 13**0.5, 0.0])
    assert advantages[3] == 0
    assert valid.tolist() == [True, True, True, False]


def test_the_last_normalisation_centres_over_all_valid_samples():
    # Weights that differ inside group 0: (0, 2) -> (-1, 3) / sqrt(2). Group 1 is equal and counts
    # as zeros, but teaches nothing. The failed one does not count.
    advantages, _ = gdpo_advantages(
        {"ocr": [0, 2, 4, 4, NAN]},
        {"ocr": [1, 3, 1, 1, 1]},
        {"ocr": [OK, OK, OK, OK, FAILED]},
        [0, 0, 1, 1, 1],
        epsilon=0.0,
    )
    # Mean 0.5 / sqrt(2): -1.5, 2.5, -0.5, -0.5 over sqrt(2), variance 9 / 2 / 3 = 1.5.
    assert advantages.tolist() == pytest.approx([-1.5 / 3**0.5, 2.5 / 3**0.5, 0, 0, 0])
    assert advantages[2:].tolist() == [0.0, 0.0, 0.0]


def test_epsilon_is_added_to_both_stds_and_the_result_is_clipped():
    scores = {"ocr": [0, 2]}, {"ocr": [3, 3]}, {"ocr": [OK, OK]}, [0, 0]
    first = 3 / (2**0.5 + 0.25)  # (2 - 1) / (std + epsilon), weight 3
    expected = first / (first * 2**0.5 + 0.25)
    advantages, _ = gdpo_advantages(*scores, epsilon=0.25)
    assert advantages.tolist() == pytest.approx([-expected, expected])
    first = 3 / (2**0.5 + 1e-4)
    advantages, _ = gdpo_advantages(*scores)
    assert advantages[1].item() == pytest.approx(first / (first * 2**0.5 + 1e-4), abs=1e-12)
    advantages, _ = gdpo_advantages(*scores, clip=0.5)
    assert advantages.tolist() == [-0.5, 0.5]


def random_scores(seed=0, size=48, groups=6):
    rng = np.random.default_rng(seed)
    names = "ocr", "jpeg", "pickscore"
    states = {
        name: rng.choice([OK, NOT_APPLICABLE, FAILED], size, p=[0.6, 0.2, 0.2]) for name in names
    }
    values = {n: np.where(states[n] == OK, rng.normal(size=size), NAN) for n in names}
    weights = {n: rng.choice([0.0, 0.3, 1.0, -0.5], size) for n in names}
    values["logged"], states["logged"] = np.full(size, NAN), np.full(size, FAILED)
    return values, weights, states, rng.integers(groups, size=size) * 11


def test_it_agrees_with_loops_over_random_scores():
    values, weights, states, ids = random_scores()
    size = len(ids)
    total, took_part, differs = (
        np.zeros(size),
        np.zeros(size, dtype=bool),
        np.zeros(size, dtype=bool),
    )
    for name, weight in weights.items():
        for group in set(ids):
            own = [
                i for i in range(size) if ids[i] == group and weight[i] and states[name][i] == OK
            ]
            took_part[own] = True
            if len(own) > 1:
                differs[own] = True
                scores = values[name][own]
                standard = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-4)
                total[own] += weight[own] * standard
    kept = total[took_part]
    # Weights differ inside groups: the mean is not 0, but who teaches nothing still gets 0.
    assert abs(kept.mean()) > 0.01
    expected = np.where(differs, (total - kept.mean()) / (kept.std(ddof=1) + 1e-4), 0)
    advantages, valid = gdpo_advantages(values, weights, states, ids)
    assert valid.tolist() == took_part.tolist()
    assert 0 < differs.sum() < took_part.sum() < size
    assert advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_the_order_of_the_samples_does_not_matter():
    values, weights, states, ids = random_scores(1)
    advantages, valid = gdpo_advantages(values, weights, states, ids)
    order = np.random.default_rng(2).permutation(len(ids))

    def moved(columns):
        return {name: column[order] for name, column in columns.items()}

    shuffled = gdpo_advantages(moved(values), moved(weights), moved(states), ids[order])
    torch.testing.assert_close(shuffled[0], advantages[order], rtol=0, atol=1e-13)
    assert torch.equal(shuffled[1], valid[order])


def test_a_rewards_unit_does_not_matter():
    scores = {"ocr": [0.1, 0.5, 0.3], "jpeg": [3.0, 1.0, 9.0]}
    rest = {name: [1.0] * 3 for name in scores}, {name: [OK] * 3 for name in scores}, [0, 0, 0]
    plain, _ = gdpo_advantages(scores, *rest, epsilon=0.0)
    scores["jpeg"] = [1000 * score - 7 for score in scores["jpeg"]]
    scaled, _ = gdpo_advantages(scores, *rest, epsilon=0.0)
    torch.testing.assert_close(scaled, plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_0(dtype):
    # Group 0: seven equal scores, whose mean is not 0.7; group 1 differs, so that the batch's
    # mean is a rounding of 0.
    values = {"ocr": np.array([0.7] * 7 + [0.1, 0.4, 0.2], dtype=dtype)}
    weights, ids = {"ocr": np.ones(10)}, [0] * 7 + [1] * 3
    advantages, valid = gdpo_advantages(values, weights, {"ocr": [OK] * 10}, ids, epsilon=0.0)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7:].all()
    assert valid.all()
    every = {"ocr": values["ocr"][:7]}, {"ocr": np.ones(7)}, {"ocr": [OK] * 7}, [0] * 7
    assert not gdpo_advantages(*every, epsilon=0.0)[0].any()


def test_groups_and_batches_of_one_get_0():
    advantages, valid = gdpo_advantages(
        {"ocr": [5, 1, 2, NAN]}, {"ocr": [1] * 4}, {"ocr": [OK, OK, OK, FAILED]}, [0, 1, 1, 0]
    )
    assert advantages[[0, 3]].tolist() == [0.0, 0.0]
    assert advantages[2] > 0
    assert valid.tolist() == [True, True, True, False]
    one, valid = gdpo_advantages({"ocr": [5.0]}, {"ocr": [1]}, {"ocr": [OK]}, [0])
    assert (one.tolist(), valid.tolist()) == ([0.0], [True])
    none, valid = gdpo_advantages(
        {"ocr": [NAN] * 2}, {"ocr": [1] * 2}, {"ocr": [FAILED] * 2}, [0, 0]
    )
    assert (none.tolist(), valid.tolist()) == ([0.0, 0.0], [False, False])


def test_inconsistent_scores_are_refused():
    with pytest.raises(ValueError, match=r"\['ocr'\] have a weight but no scores"):
        gdpo_advantages({"jpeg": [1.0]}, {"ocr": [1.0]}, {"jpeg": [OK]}, [0])
    with pytest.raises(ValueError, match="'ocr' has non-finite scores"):
        gdpo_advantages({"ocr": [NAN]}, {"ocr": [1.0]}, {"ocr": [OK]}, [0])
    with pytest.raises(ValueError, match="no reward"):
        gdpo_advantages({}, {}, {}, [])
    with pytest.raises(ValueError, match="equal length"):
        gdpo_advantages({"ocr": [1.0]}, {"ocr": [1.0]}, {"ocr": [OK]}, [0, 0])


def test_zero_variance_rewards_are_equal_within_every_group():
    values = {
        "between": [1, 1, 2, 2],  # differs between the groups only
        "within": [1, 1, 2, 3],
        "failed": [1, NAN, 2, 2],  # differs nowhere among what is left
        "unweighted": [1, 9, 2, 2],  # the 9 has no weight
        "absent": [NAN] * 4,
        "logged": [1, 1, 1, 1],
    }
    weights = {name: [1.0] * 4 for name in values if name != "logged"}
    weights["unweighted"] = [1.0, 0.0, 1.0, 1.0]
    states = {name: [OK] * 4 for name in values}
    states["failed"], states["absent"] = [OK, FAILED, OK, OK], [NOT_APPLICABLE] * 4
    found = zero_variance_rewards(values, weights, states, [0, 0, 1, 1])
    assert found == ["between", "failed", "unweighted"]
