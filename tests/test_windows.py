import itertools

import pytest
import torch

from flow_grpo.schedules import WINDOW_STRATEGIES, sliding_window, trained_steps

SLIDING = WINDOW_STRATEGIES[1:]


def slide(epoch, **changes):
    settings = {
        "num_steps": 6,
        "size": 2,
        "window_range": (0, 0),
        "strategy": "progressive",
        "epochs_per_place": 2,
        "shift": 1,
        "roll_back": False,
        "decay": 0.1,
        "decay_from": 13,
    }
    return sliding_window(epoch, **(settings | changes))


def starts(num_epochs, **changes):
    return [slide(epoch, **changes)[0] for epoch in range(num_epochs)]


def test_a_progressive_window_stays_moves_and_remains_at_its_last_place():
    # 6 steps, the last never: starts 0 to 3 for a window of 2, two epochs each.
    assert starts(11) == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert [slide(epoch) for epoch in (0, 3, 999)] == [(0, 1), (1, 2), (3, 4)]


def test_a_window_that_rolls_back_begins_anew_after_its_last_places_stay():
    assert starts(18, roll_back=True) == [0, 0, 1, 1, 2, 2, 3, 3] * 2 + [0, 0]
    assert slide(8 * 10**9 + 5, roll_back=True) == (2, 3)


def test_a_shift_of_several_steps_ends_at_the_last_place_that_fits():
    # Of 10 steps a window of 4 may start at 0 to 5: 0, 3, then not 6 but 5.
    wide = {"num_steps": 10, "size": 4, "epochs_per_place": 1}
    assert starts(4, shift=3, **wide) == [0, 3, 5, 5]
    assert starts(4, shift=5, **wide) == [0, 5, 5, 5]  # 5 is reached exactly, and once
    assert starts(4, shift=99, roll_back=True, **wide) == [0, 5, 0, 5]


def test_a_window_slides_inside_its_range_only():
    inside = {"num_steps": 10, "size": 3, "window_range": (2, 7), "epochs_per_place": 1}
    assert [slide(epoch, **inside) for epoch in range(4)] == [
        (2, 3, 4),
        (3, 4, 5),
        (4, 5, 6),
        (4, 5, 6),
    ]
    # A range as long as the window: one place, whatever the epoch.
    fixed = inside | {"size": 5}
    assert {slide(epoch, roll_back=roll_back, **fixed) for epoch in range(9)
            for roll_back in (False, True)} == {(2, 3, 4, 5, 6)}  # fmt: skip


def stays(num_epochs, **changes):
    return [len(list(run)) for _, run in itertools.groupby(starts(num_epochs, **changes))]


def test_decay_shortens_the_stay_linearly_towards_a_quarter():
    # 8 epochs, a quarter is 2; at start p of 10 steps: 8 (1 - p/10) + 2 p/10 = 8 - 0.6 p:
    # 8, 7.4, 6.8, 6.2, 5.6, 5 and so on down, whole epochs only.
    decay = {"num_steps": 10, "strategy": "decay", "epochs_per_place": 8, "roll_back": True}
    expected = [8, 7, 6, 6, 5, 5, 4, 3]
    assert stays(sum(expected), **decay) == expected
    assert starts(sum(expected) + 1, **decay)[-1] == 0
    # Fewer than 4 epochs: the quarter counts as 1. 3 - 0.2 p: 3, 2.8, 2.6, 2.4, 2.2, 2, 1.8, 1.6.
    short = decay | {"epochs_per_place": 3}
    assert stays(3 + 2 * 5 + 2, **short) == [3, 2, 2, 2, 2, 2, 1, 1]
    assert set(stays(8, **decay | {"epochs_per_place": 1})) == {1}


def test_decay_is_exact_where_floats_are_not():
    # 20 epochs, a quarter is 5, start 16 of 20 steps: 20 * 0.2 + 5 * 0.8 = 8, in floats 7.99...
    # 20 - 15 p / 20 before and after it: 8.75 and 7.25.
    decay = {"num_steps": 20, "strategy": "decay", "epochs_per_place": 20, "roll_back": True}
    assert stays(999, **decay)[15:18] == [8, 8, 7]


def test_exp_decay_shortens_the_stay_beyond_its_first_start():
    # ceil(5 exp(-0.5 k)) for k = 0, 1, 2, 3, 4, 5: 5, 3.03, 1.84, 1.12, 0.68, 0.41.
    decay = {"num_steps": 10, "strategy": "exp_decay", "epochs_per_place": 5, "roll_back": True}
    expected = [5, 5, 5, 4, 2, 2, 1, 1]
    assert stays(25, decay=0.5, decay_from=2, **decay) == expected
    assert starts(26, decay=0.5, decay_from=2, **decay)[-1] == 0
    # No decay is "progressive"; one beyond measure leaves each place its one epoch.
    assert stays(40, decay=0.0, decay_from=0, **decay) == [5] * 8
    assert stays(5 + 7, decay=1e9, decay_from=0, **decay) == [5] + [1] * 7


def test_exp_decay_with_the_papers_settings():
    # 25 steps, windows of 4, 25 epochs, k = 0.1 from start 13: 25 exp(-0.1 (p - 13)).
    lengths = stays(
        9999, num_steps=25, size=4, strategy="exp_decay", epochs_per_place=25, roll_back=True
    )
    # p = 14 to 20: 22.6, 20.5, 18.5, 16.8, 15.2, 13.7, 12.4.
    assert lengths[:21] == [25] * 14 + [23, 21, 19, 17, 16, 14, 13]


@pytest.mark.parametrize("roll_back", [False, True])
@pytest.mark.parametrize("strategy", SLIDING)
def test_a_sliding_window_is_a_function_of_the_epoch_alone(strategy, roll_back):
    settings = {"num_steps": 20, "strategy": strategy, "roll_back": roll_back, "shift": 2}
    forwards = [slide(epoch, **settings) for epoch in range(60)]
    torch.manual_seed(9)
    backwards = [slide(epoch, **settings) for epoch in reversed(range(60))]
    assert forwards == backwards[::-1]
    assert all(window[-1] < 19 for window in forwards)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "window size (0) takes all steps but the last, which cannot slide"),
        ({"size": -1}, "window size (-1) is negative"),
        ({"size": 6}, "window size (6) does not fit into window range (0, 5); "
                      "the nearest valid size is 5"),
        ({"window_range": (0, 6)}, "the nearest valid range is (0, 5)"),
        ({"strategy": "random"}, "('random') does not slide; those that do are progressive, "
                                 "decay, exp_decay"),
        ({"epochs_per_place": 0}, "epochs_per_place (0) must be at least 1"),
        ({"shift": 0}, "shift (0) must be at least 1"),
        ({"decay": -0.1}, "decay (-0.1) must not be below 0"),
        ({"decay": float("nan")}, "decay (nan) must not be below 0"),
    ],
)  # fmt: skip
def test_an_impossible_sliding_window_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError) as error:
        slide(3, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def choose(fraction, stochastic=tuple(range(9)), num_steps=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return trained_steps(stochastic, num_steps=num_steps, fraction=fraction, generator=generator)


def test_fraction_1_trains_every_stochastic_step():
    assert choose(1.0) == tuple(range(9))
    assert choose(0.9) == tuple(range(9))
    assert choose(1.0, stochastic=(2, 3)) == (2, 3)
    assert choose(0.2, stochastic=(2, 3)) == (2, 3)


def test_a_fraction_counts_all_steps_and_draws_among_the_stochastic_ones():
    # 0.6 of 50 steps is 30, drawn among the 49 that are stochastic.
    drawn = choose(0.6, stochastic=range(49), num_steps=50)
    assert len(set(drawn)) == 30
    assert list(drawn) == sorted(drawn)
    assert set(drawn) < set(range(49))
    # 0.29 * 100 is 28.999999999999996 in floats; 0.699 of 10 is rounded down.
    assert len(choose(0.29, stochastic=range(99), num_steps=100)) == 29
    assert len(choose(0.699)) == 6


def test_a_tiny_fraction_trains_one_step():
    drawn = {choose(1e-6, stochastic=(1, 4, 7), seed=seed) for seed in range(50)}
    assert drawn == {(1,), (4,), (7,)}


def test_every_set_of_steps_is_equally_likely():
    draws = [choose(0.2, stochastic=(0, 2, 3, 8), seed=seed) for seed in range(3000)]
    # 6 pairs, 500 each, standard deviation sqrt(3000 * 1/6 * 5/6) = 20.
    pairs = list(itertools.combinations((0, 2, 3, 8), 2))
    assert set(draws) == set(pairs)
    assert all(abs(draws.count(pair) - 500) < 90 for pair in pairs)


def test_equal_seeds_draw_equal_steps():
    assert [choose(0.5, seed=seed) for seed in range(20)] == [
        choose(0.5, seed=seed) for seed in range(20)
    ]
    assert len({choose(0.5, seed=seed) for seed in range(20)}) > 5


@pytest.mark.parametrize(
    ("fraction", "nearest"),
    [(0.0, "0.1"), (-1.0, "0.1"), (1.01, "1"), (float("nan"), "0.1"), (float("inf"), "1")],
)
def test_a_fraction_outside_0_to_1_is_refused(fraction, nearest):
    with pytest.raises(ValueError) as error:
        choose(fraction)
    assert str(error.value) == (
        f"timestep fraction ({fraction}) must be in (0, 1]; the nearest valid is {nearest}"
    )
