import math

import pytest
import torch

from flow_grpo.schedules import learning_rate, sde_window


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def test_size_0_takes_every_step_but_the_last():
    assert sde_window(10, 0, (0, 0), generator=source()) == tuple(range(9))
    assert sde_window(10, 0, (3, 5), generator=source()) == tuple(range(9))
    assert sde_window(2, 0, (0, 0), generator=source()) == (0,)


def test_window_is_a_run_of_neighbours_inside_the_range_and_reaches_both_ends():
    windows = {sde_window(10, 3, (1, 6), generator=source(seed)) for seed in range(100)}
    assert windows == {(1, 2, 3), (2, 3, 4), (3, 4, 5)}


def test_window_never_holds_the_last_step():
    windows = {sde_window(6, 2, (0, 0), generator=source(seed)) for seed in range(100)}
    assert windows == {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_every_start_is_equally_likely():
    generator = source()
    starts = [sde_window(10, 2, (0, 5), generator=generator)[0] for _ in range(4000)]
    # 1000 each, standard deviation sqrt(4000 * 1/4 * 3/4) = 27.
    assert all(abs(starts.count(start) - 1000) < 110 for start in range(4))


def test_equal_seeds_draw_equal_windows():
    first = [sde_window(20, 2, (0, 0), generator=source(seed)) for seed in range(20)]
    assert first == [sde_window(20, 2, (0, 0), generator=source(seed)) for seed in range(20)]
    assert len(set(first)) > 5


@pytest.mark.parametrize(
    ("num_steps", "size", "window_range", "message"),
    [
        (10, 4, (0, 3), "window size (4) does not fit into window range (0, 3); "
                        "the nearest valid size is 3"),
        (10, 2, (0, 10), "the nearest valid range is (0, 9)"),
        (10, 2, (-1, 5), "the nearest valid range is (0, 5)"),
        (10, 2, (5, 5), "the nearest valid range is (4, 5)"),
        (10, 2, (12, 14), "the nearest valid range is (8, 9)"),
        (10, -1, (0, 5), "window size (-1) is negative; 0"),
        (1, 0, (0, 0), "the nearest valid num_steps is 2"),
    ],
)  # fmt: skip
def test_a_window_that_does_not_fit_is_refused(num_steps, size, window_range, message):
    with pytest.raises(ValueError) as error:
        sde_window(num_steps, size, window_range, generator=source())
    assert message in str(error.value)


def rate(update, schedule, warmup=4, total=14):
    return learning_rate(
        update, peak=2.0, warmup_updates=warmup, total_updates=total, schedule=schedule
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate_warms_up_linearly_and_the_first_update_moves(schedule):
    assert [rate(u, schedule) for u in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rate(0, schedule, warmup=0) == 2.0


def test_learning_rate_decays_by_its_schedule():
    # Ten updates of decay from 4 to 14: update 9 is half way, 14 the end.
    assert [rate(u, "constant") for u in (9, 14, 99)] == [2.0, 2.0, 2.0]
    assert [rate(u, "linear") for u in (5, 9, 14, 99)] == [1.8, 1.0, 0.0, 0.0]
    cosine = [rate(u, "cosine") for u in (4, 9, 14, 99)]
    assert cosine == pytest.approx([2.0, 1.0, 0.0, 0.0])
    assert rate(5, "cosine") == pytest.approx(1 + math.cos(math.pi / 10))


def test_an_impossible_learning_rate_is_refused():
    with pytest.raises(ValueError, match=r"'cosin'.*constant, linear, cosine"):
        rate(0, "cosin")
    with pytest.raises(ValueError, match="the nearest valid is 3"):
        rate(4, "linear", warmup=4, total=4)
    assert rate(9, "constant", warmup=4, total=4) == 2.0
