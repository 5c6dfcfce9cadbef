import pytest

from flow_grpo.batching import deal, plan_batches


def plan(**changes):
    numbers = {"groups_per_epoch": 48, "group_size": 24, "updates_per_epoch": 2,
               "batch_size": 9, "world_size": 1}  # fmt: skip
    return plan_batches(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("world_size", "batch_size", "per_rank", "batch", "batches"),
    [
        (1, 9, 1152, 9, 128),
        (8, 9, 144, 9, 16),
        (32, 9, 36, 9, 4),
        (32, 10, 36, 9, 4),  # 10 does not divide 36
        (32, 35, 36, 18, 2),
        (32, 1000, 36, 36, 1),
        (1, 7, 1152, 6, 192),
        (8, 1, 144, 1, 144),
    ],
)
def test_48_groups_of_24_are_planned_for_any_world(
    world_size, batch_size, per_rank, batch, batches
):
    result = plan(world_size=world_size, batch_size=batch_size)
    assert result.samples_per_epoch == 1152
    assert result.samples_per_rank == per_rank
    assert result.batch_size == batch
    assert result.rollout_batches == batches
    assert (result.groups_per_epoch, result.group_size, result.updates_per_epoch) == (48, 24, 2)
    assert result.world_size == world_size


def test_only_an_indivisible_total_is_refused_and_the_nearest_is_named():
    with pytest.raises(ValueError) as error:
        plan(groups_per_epoch=47, group_size=25, world_size=8)
    assert str(error.value) == (
        "groups_per_epoch (47) * group_size (25) = 1175 samples do not divide over "
        "world_size (8); the nearest valid groups_per_epoch is 48"
    )
    # 3 groups of 4 over 8 ranks: multiples of 8 / gcd(4, 8) = 2 are valid; a tie goes up.
    with pytest.raises(ValueError, match=r"nearest valid groups_per_epoch is 4$"):
        plan(groups_per_epoch=3, group_size=4, world_size=8)
    with pytest.raises(ValueError, match=r"nearest valid groups_per_epoch is 32$"):
        plan(groups_per_epoch=1, group_size=3, world_size=32)
    with pytest.raises(ValueError, match=r"nearest valid groups_per_epoch is 40$"):
        plan(groups_per_epoch=41, group_size=25, world_size=8)
    assert plan(groups_per_epoch=3, group_size=8, world_size=8).samples_per_rank == 3


@pytest.mark.parametrize("world_size", [2, 3, 6, 8, 12, 28])
def test_the_nearest_valid_number_is_valid_and_nearest(world_size):
    for groups in range(1, 40):
        try:
            plan(groups_per_epoch=groups, group_size=5, world_size=world_size)
        except ValueError as error:
            nearest = int(str(error).rsplit(" ", 1)[1])
            valid = [g for g in range(1, 200) if g * 5 % world_size == 0]
            assert nearest in valid
            assert abs(nearest - groups) == min(abs(g - groups) for g in valid)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size (1)"),
        ({"group_size": 1}, "the nearest valid group_size is 2"),
        ({"groups_per_epoch": 0}, "groups_per_epoch (0) must be positive"),
        ({"updates_per_epoch": -1}, "updates_per_epoch (-1) must be positive"),
        ({"batch_size": 0}, "the nearest valid batch_size is 1"),
        ({"world_size": 0}, "world_size (0) must be positive"),
        ({"updates_per_epoch": 1153}, "the nearest valid updates_per_epoch is 1152"),
    ],
)
def test_impossible_numbers_are_refused(changes, message):
    with pytest.raises(ValueError) as error:
        plan(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(("num_items", "world_size"), [(1152, 32), (10, 4), (3, 8), (0, 2)])
def test_items_are_dealt_once_contiguously_and_evenly(num_items, world_size):
    shares = [deal(num_items, world_size, rank) for rank in range(world_size)]
    assert [i for share in shares for i in share] == list(range(num_items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert deal(1152, 32, 1) == range(36, 72)
