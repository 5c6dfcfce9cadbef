"""Items fail one by one, and malformed answers are said to be so."""

import numpy as np
import pytest
import torch

from flow_grpo.rewards.base import (
    NotApplicable,
    Samples,
    Scores,
    State,
    checked,
    failed,
    score_each,
    to_uint8,
)


def test_each_sample_fails_or_is_skipped_by_itself():
    def score(_image, prompt, metadata):
        if prompt == "skip":
            raise NotApplicable("nothing to see")
        return 6 / metadata["divisor"], {"divisor": metadata["divisor"]}

    metadata = [{"divisor": 3}, {"divisor": 1}, {"divisor": 0}, {}]
    samples = Samples(torch.zeros(4, 3, 2, 2), ["a", "skip", "c", "d"], metadata)
    scores = score_each(samples, score)
    expected = torch.tensor([2.0, torch.nan, torch.nan, torch.nan])
    torch.testing.assert_close(scores.values, expected, equal_nan=True)
    assert scores.states.tolist() == [0, State.NOT_APPLICABLE, State.FAILED, State.FAILED]
    assert scores.reasons == [
        "",
        "nothing to see",
        "ZeroDivisionError: division by zero",
        "KeyError: 'divisor'",
    ]
    expected = torch.tensor([3.0, torch.nan, torch.nan, torch.nan])
    torch.testing.assert_close(scores.details["divisor"], expected, equal_nan=True)


def test_failed_scores_are_well_formed():
    scores = failed(2, "why")
    assert checked(scores, 2).reasons == ["why", "why"]
    assert checked(scores, 2).states.tolist() == [State.FAILED] * 2


def test_checking_does_not_change_the_given_scores():
    given = Scores(torch.tensor([1.0, torch.nan]), torch.zeros(2, dtype=torch.uint8), ["", ""], {})
    mended = checked(given, 2)
    assert mended.states.tolist() == [State.OK, State.FAILED]
    assert given.states.tolist() == [0, 0]
    assert given.reasons == ["", ""]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("states", torch.zeros(3, dtype=torch.uint8), "states of shape (3,) for 2 samples"),
        ("values", torch.ones(2, 1), "values of shape (2, 1) for 2 samples"),
        ("reasons", [""], "reasons of shape (1,) for 2 samples"),
        ("details", {"exact": torch.ones(1)}, "exact of shape (1,) for 2 samples"),
    ],
)
def test_every_column_must_have_one_entry_a_sample(field, value, reason):
    good = Scores(torch.ones(2), torch.zeros(2, dtype=torch.uint8), ["", ""], {})
    assert checked(good, 2).states.tolist() == [State.OK] * 2
    mended = checked(good._replace(**{field: value}), 2)
    assert mended.states.tolist() == [State.FAILED] * 2
    assert mended.reasons == [f"returned {reason}"] * 2


def test_pixels_are_rounded_and_clamped():
    # 0.5 * 255 = 127.5 rounds to the even 128; 1/510 * 255 = 0.5 to the even 0
    column = torch.tensor([-1.0, 1 / 510, 0.5, 1.0, 2.0])
    pixels = to_uint8(column.expand(3, 1, 5))
    assert pixels.shape == (1, 5, 3)
    assert pixels.dtype == np.uint8
    assert pixels[0, :, 0].tolist() == [0, 0, 128, 255, 255]


def test_channels_become_the_last_axis_in_order():
    image = torch.tensor([0.0, 0.2, 0.4])[:, None, None].expand(3, 2, 4)
    assert to_uint8(image)[1, 3].tolist() == [0, 51, 102]
