"""Branching saves velocities and changes nothing else; settings that cannot mean anything fail."""

import collections
from types import SimpleNamespace

import pytest
import torch
import toy
from ml_collections import ConfigDict

from config.base import locked_config
from flow_grpo import collecting, session, settings
from flow_grpo.epoch_steps import epoch_steps
from flow_grpo.progress import progress_bar

NUM_STEPS, WINDOW = 6, 2


@pytest.fixture
def branching_config(tiny_config):
    """Return 4 groups of 4 that branch at step 2 or 3 of 6, in batches of 8."""
    config = tiny_config.copy_and_resolve_references()
    config.sample.num_steps = NUM_STEPS
    config.sample.sde_window_size, config.sample.sde_window_range = WINDOW, (2, 5)
    config.sample.same_latent, config.sample.branching = True, True
    config.train.kl_coef = 0.01
    return config.lock()


class Collection:
    """Collect an epoch as one rank of a world, and watch its velocities and its images."""

    def __init__(self, run, epoch: int = 0, *, rank: int = 0, world_size: int = 1):
        self.samples = collections.Counter()  # velocities that were computed, by sigma and kind
        self.states = collections.defaultdict(list)  # what they were computed for, by sigma
        images = []
        velocity, submit, accelerator = run.policy.velocity, run.rewards.submit, run.accelerator

        def watched_velocity(x, sigma, *arguments, weights="current", replay=False):
            (level,) = {round(s, 5) for s in sigma.tolist()}
            self.samples[level, "reference" if weights == "reference" else "policy"] += len(x)
            self.states[level] += [row.clone() for row in x]
            return velocity(x, sigma, *arguments, weights=weights, replay=replay)

        def watched_submit(samples, **names):
            images.append(samples.images)
            return submit(samples, **names)

        per_rank = run.plan.samples_per_epoch // world_size
        run.plan = run.plan._replace(samples_per_rank=per_rank)
        run.policy.velocity, run.rewards.submit = watched_velocity, watched_submit
        run.accelerator = SimpleNamespace(process_index=rank, device=accelerator.device)
        bar = progress_bar(accelerator, "rollout", 1)
        self.kept = collecting.collect(run, epoch, bar)
        self.images = torch.cat(images)
        run.policy.velocity, run.rewards.submit = velocity, submit
        run.accelerator = accelerator

    def per_step(self, kind: str = "policy") -> list[int]:
        """Return the number of velocities at every step."""
        levels = [round(s, 5) for s in self.kept.sigmas[:-1].tolist()]
        return [self.samples[level, kind] for level in levels]

    def distinct(self, step: int) -> int:
        """Return how many different states a step saw."""
        rows = torch.stack(self.states[round(self.kept.sigmas[step].item(), 5)])
        return len(rows.unique(dim=0))


@pytest.mark.parametrize("mini_group_size", [0, 2])
@pytest.mark.parametrize("algorithm", ["grpo", "grpo_guard"])
@pytest.mark.parametrize("sde_type", ["flow_sde", "cps"])
def test_branching_changes_nothing(
    branching_config, make_run, mini_group_size, algorithm, sde_type, tmp_path
):
    branching_config.sample.mini_group_size = mini_group_size
    branching_config.algorithm, branching_config.sample.sde_type = algorithm, sde_type
    found = {}
    for branching in (True, False):
        branching_config.sample.branching = branching
        branching_config.run_name = f"branching-{branching}"
        found[branching] = Collection(make_run(branching_config))
    one, other = found[True], found[False]
    assert one.kept.steps.prefix in (2, 3)
    assert other.kept.steps.prefix == 0
    assert sorted(one.kept.tensors) == sorted(other.kept.tensors)
    # All batches are of 8, so not even rounding differs.
    assert torch.equal(one.images, other.images)
    for name in one.kept.tensors:
        assert torch.equal(one.kept.tensors[name], other.kept.tensors[name]), name
    assert len(one.images) == 16
    assert len(one.images.unique(dim=0)) == 16  # members do differ, by the window's noise


@pytest.mark.parametrize(("mini_group_size", "sharing"), [(0, 4), (2, 8), (1, 16), (4, 4)])
def test_the_prefix_is_run_once_for_those_that_share_their_noise(
    branching_config, make_run, mini_group_size, sharing
):
    branching_config.sample.mini_group_size = mini_group_size
    for epoch in range(3):
        branching_config.run_name = f"run-{epoch}"
        found = Collection(make_run(branching_config), epoch)
        prefix = found.kept.steps.prefix
        assert found.kept.steps.stochastic == (prefix, prefix + 1)
        forward = max(sharing, 8)  # a batch of 4 is filled up to the shape of all batches, 8
        assert found.per_step() == [forward] * prefix + [16] * (NUM_STEPS - prefix)
        window = [int(step in found.kept.steps.trained) for step in range(NUM_STEPS)]
        assert found.per_step("reference") == [16 * trained for trained in window]
        assert [found.distinct(step) for step in range(prefix + 1)] == [sharing] * (prefix + 1)
        assert found.distinct(prefix + 1) == 16


def test_without_branching_the_prefix_is_run_for_all(branching_config, make_run):
    branching_config.sample.branching = False
    found = Collection(make_run(branching_config))
    assert found.per_step() == [16] * NUM_STEPS
    assert found.distinct(0) == 4


def test_members_share_their_noise_in_runs_of_the_mini_groups_size(tmp_path):
    settings = {"sample__same_latent": True, "sample__mini_group_size": 3,
                "sample__sde_window_size": 1, "sample__sde_window_range": (0, 1)}  # fmt: skip
    run = toy.build(toy.config(tmp_path, **settings))
    first = collecting.collect(run, 0, progress_bar(run.accelerator, "rollout", 1))
    run.rewards.close()
    states = first.tensors["latents"][:, 0].flatten(1)  # at sigma 1
    expected = torch.arange(48) // 3
    same = (states[:, None] == states[None]).all(-1)
    assert torch.equal(same, expected[:, None] == expected[None])


def test_members_without_same_latent_have_noise_of_their_own(tmp_path):
    settings = {"sample__sde_window_size": 1, "sample__sde_window_range": (0, 1)}
    run = toy.build(toy.config(tmp_path, **settings))
    first = collecting.collect(run, 0, progress_bar(run.accelerator, "rollout", 1))
    run.rewards.close()
    assert len(first.tensors["latents"][:, 0].unique(dim=0)) == 48


def test_the_batch_size_changes_no_sample(tmp_path):
    settings = {"sample__same_latent": True, "sample__branching": True,
                "sample__mini_group_size": 4, "sample__sde_window_size": 2,
                "sample__sde_window_range": (1, 4)}  # fmt: skip
    found = []
    for batch_size in (48, 12, 2):
        config = toy.config(tmp_path, **settings, sample__batch_size=batch_size)
        run = toy.build(config)
        bar = progress_bar(run.accelerator, "rollout", 1)
        found.append(collecting.collect(run, 0, bar).tensors)
        run.rewards.close()
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(other[name], tensor), name
    assert len(found[0]["next_latents"][:, 0].unique(dim=0)) == 48


def test_ranks_that_cut_a_mini_group_run_its_prefix_each_and_sample_the_same(
    branching_config, make_run
):
    # 3 groups of 4 in mini-groups of 4 on 2 ranks: the second group lies on both.
    branching_config.sample.groups_per_epoch, branching_config.sample.batch_size = 3, 2
    run = make_run(branching_config)
    whole = Collection(run)
    parts = [Collection(run, rank=rank, world_size=2) for rank in (0, 1)]
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    for name, tensor in whole.kept.tensors.items():
        assert torch.equal(torch.cat([part.kept.tensors[name] for part in parts]), tensor), name
    assert [part.distinct(0) for part in (whole, *parts)] == [3, 2, 2]


def test_ranks_that_cut_a_mini_group_run_as_many_forwards(branching_config, make_run):
    """FSDP and ZeRO 3 gather a layer's weights from all ranks: a forward of one alone hangs."""
    # 3 groups of 4 on 4 ranks: the middle ones have members of two groups, the others of one.
    branching_config.sample.groups_per_epoch, branching_config.sample.batch_size = 3, 1
    run = make_run(branching_config)
    parts = [Collection(run, rank=rank, world_size=4) for rank in range(4)]
    assert [part.distinct(0) for part in parts] == [1, 2, 2, 1]
    for part in parts:
        assert part.per_step() == parts[0].per_step()


BAD = {
    "branching alone": (
        "grpo", {"sample__branching": True, "sample__sde_window_size": 1},
        r"sample.branching .* set sample.same_latent to True",
    ),
    "branching without a window": (
        "grpo", {"sample__branching": True, "sample__same_latent": True},
        r"sample.branching needs a window to branch at: set sample.sde_window_size",
    ),
    "branching without noise": (
        "nft", {"sample__branching": True, "sample__same_latent": True,
                "sample__sde_window_size": 1, "sample__noise_level": 0.0},
        r"sample.branching needs a window .* and sample.noise_level",
    ),
    "mini-groups that do not divide": (
        "grpo", {"sample__same_latent": True, "sample__mini_group_size": 5},
        r"mini_group_size \(5\) must divide sample.group_size \(12\).* nearest valid is 4",
    ),
    "mini-groups below 0": (
        "grpo", {"sample__same_latent": True, "sample__mini_group_size": -2},
        r"mini_group_size \(-2\) must divide .* nearest valid is 1",
    ),
    "mini-groups without same_latent": (
        "grpo", {"sample__mini_group_size": 4},
        r"does not read sample.mini_group_size \(4; default 0\)",
    ),
    "window larger than its range": (
        "grpo", {"sample__sde_window_size": 3, "sample__sde_window_range": (1, 3)},
        r"window size \(3\) does not fit into window range \(1, 3\); the nearest valid size is 2",
    ),
    "window beyond the last step": (
        "nft", {"sample__sde_window_size": 2, "sample__sde_window_range": (3, 6)},
        r"window range \(3, 6\) is not inside \(0, 5\)",
    ),
    "a sliding window of all steps": (
        "grpo", {"sample__sde_window_strategy": "progressive"},
        r"does not read sample.sde_window_strategy \(progressive; default random\)",
    ),
    "a strategy that does not exist": (
        "grpo", {"sample__sde_window_size": 1, "sample__sde_window_strategy": "slow"},
        r"sde_window_strategy \('slow'\) must be one of random, progressive, decay, exp_decay",
    ),
    "more than all noise": (
        "grpo_guard", {"sample__sde_type": "cps", "sample__noise_level": 2.0},  # sin(pi) = 0
        r"noise_level \(2.0\) must be at most 1 for cps",
    ),
    "a scale that only Flow-SDE has": (
        "grpo", {"sample__sde_type": "dance_sde", "train__kl_coef": 0.1,
                 "train__kl_scale": "reference"},
        r"kl_scale \('reference'\) .* flow_sde; with sample.sde_type 'dance_sde'",
    ),
    "more updates than pairs": (
        "dpo", {"train__updates_per_epoch": 9},
        r"updates_per_epoch \(9\) is more than the 4 pairs that 4 groups make; .* is 4",
    ),
    "an algorithm that is none": (
        "odd_rewards:Contrast", {}, r"is no algorithm .* there are dpo, grpo, ",
    ),
    "no noise to learn from": (
        "grpo_guard", {"sample__noise_level": 0.0},
        r"sample.noise_level \(0.0\) must be above 0 for algorithm 'grpo_guard'",
    ),
    "a share of no steps": (
        "grpo", {"train__timestep_fraction": 0.0}, r"fraction \(0.0\)",
    ),
    "a share of more than all": (
        "grpo", {"train__timestep_fraction": 1.5}, r"fraction \(1.5\)",
    ),
    "a solver that does not exist": (
        "grpo", {"sample__ode_solver": "heun"}, r"unknown sample.ode_solver 'heun'; there are: eul",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_steps_that_no_epoch_could_have_are_refused_in_one_line(tmp_path, case):
    algorithm, settings, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        session.check_config(toy.config(tmp_path, algorithm, **settings), 1)
    assert "\n" not in str(error.value)


def test_what_a_flag_switches_off_in_a_preset_is_only_told(tmp_path, caplog):
    config = toy.config(tmp_path, "grpo", train__kl_scale="reference", train__nft_beta=0.1)
    session.check_config(config, 1, {"train.kl_coef"})
    assert "not read with these settings: train.kl_scale (reference; default true)" in caplog.text
    with pytest.raises(ValueError, match=r"does not read train.nft_beta \(0.1; default 1.0\) with"):
        session.check_config(config, 1, {"train.kl_coef", "train.nft_beta"})
    with pytest.raises(ValueError, match=r"train.kl_scale .*, train.nft_beta"):  # all at once
        session.check_config(config, 1)


UNREAD = [
    ("grpo", {"train__nft_beta": 0.1}),
    ("grpo", {"train__kl_type": "velocity"}),  # without a kl_coef
    ("grpo", {"train__kl_scale": "reference"}),
    ("grpo", {"train__kl_coef": 0.1, "train__kl_type": "velocity", "train__kl_scale": "reference"}),
    ("grpo", {"train__old_update_freq": 5}),
    ("grpo", {"train__draws_per_sample": 2}),
    ("grpo", {"train__adv_type": "gdpo", "sample__global_std": False}),
    ("grpo", {"sample__sde_window_epochs": 5}),
    ("grpo", {"sample__sde_window_size": 1, "sample__sde_window_epochs": 5}),
    ("grpo_guard", {"train__dpo_beta": 5.0}),
    ("grpo_guard", {"train__rwr_temperature": 0.5}),
    ("dpo", {"train__clip_range": 0.1}),
    ("dpo", {"train__kl_coef": 0.1}),
    ("dpo", {"train__adv_clip_max": 1.0}),
    ("dpo", {"train__steps_per_update": 1}),
    ("dpo", {"train__timestep_fraction": 0.5}),
    ("sft", {"train__adv_type": "gdpo"}),
    ("sft", {"train__rwr_temperature": 0.5}),
    ("rwr", {"train__nft_old_decay": 0.1}),
    ("nft", {"train__old_update_freq": 5}),
    ("nft", {"train__clip_range_high": 0.1}),
    ("nft", {"train__kl_coef": 0.1, "train__kl_type": "velocity"}),
    ("nft", {"sample__noise_level": 0.0, "sample__sde_type": "cps"}),
]


@pytest.mark.parametrize(("algorithm", "given"), UNREAD)
def test_a_setting_that_nothing_reads_is_refused(tmp_path, algorithm, given):
    name = [*given][-1].replace("__", ".")
    with pytest.raises(ValueError, match=rf"algorithm '{algorithm}' does not read {name} \("):
        session.check_config(toy.config(tmp_path, algorithm, **given), 1)


READ = [
    ("grpo", {"sample__sde_window_range": (0, 3)}),  # one flag switches a preset's window off
    ("grpo", {"train__kl_coef": 0.1, "train__kl_type": "gaussian", "train__kl_scale": "reference"}),
    ("grpo", {"sample__sde_window_size": 1, "sample__sde_window_strategy": "exp_decay",
              "sample__sde_window_epochs": 5, "sample__sde_window_decay": 0.3}),
    ("grpo_guard", {"train__clip_range_high": 0.1, "train__steps_per_update": 2}),
    ("dpo", {"train__old_update_freq": 3, "sample__sde_type": "cps"}),
    ("rwr", {"train__kl_coef": 0.1, "train__draws_per_sample": 2, "sample__noise_level": 0.0}),
    ("nft", {"train__adv_clip_max": 1.0, "sample__global_std": False,
             "train__nft_old_ramp": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "given"), READ)
def test_a_setting_that_is_read_is_not(tmp_path, algorithm, given):
    plan = session.check_config(toy.config(tmp_path, algorithm, **given), 1)
    assert plan.samples_per_epoch == 48


def test_the_defaults_that_count_as_unset_are_those_of_the_configuration():
    config = locked_config()
    for dotted, default in settings.CHOICES.items():
        section, name = dotted.split(".")
        assert config[section][name] == default, dotted
        assert type(config[section][name]) is type(default), dotted


def test_a_recorded_configuration_tells_what_was_read():
    recorded = settings.Recorded(ConfigDict({"seed": 1, "train": {"a": 2, "b": 3}}))
    assert (recorded.seed, recorded.train.b) == (1, 3)
    assert recorded.seen == {"seed", "train.b"}
    with pytest.raises(AttributeError):
        recorded.train.c  # noqa: B018


def test_the_steps_of_an_epoch_are_those_of_the_configuration(tmp_path):
    given = {
        "sample__num_steps": 10, "sample__sde_window_size": 3, "sample__sde_window_range": (2, 9),
        "sample__sde_window_strategy": "progressive", "sample__sde_window_epochs": 2,
        "sample__sde_window_shift": 2, "train__timestep_fraction": 0.2,
        "sample__same_latent": True, "sample__branching": True, "sample__mini_group_size": 4,
    }  # fmt: skip
    config = toy.config(tmp_path, **given)
    found = [epoch_steps(config, epoch, trains_steps=True) for epoch in range(8)]
    assert [steps.stochastic[0] for steps in found] == [2, 2, 4, 4, 6, 6, 6, 6]
    for steps in found:
        assert len(steps.stochastic) == 3
        assert len(steps.trained) == 2  # floor(0.2 * 10)
        assert set(steps.trained) <= set(steps.stochastic)
        assert (steps.prefix, steps.sharing) == (steps.stochastic[0], 4)
    assert len({steps.trained for steps in found}) > 3
    assert epoch_steps(config, 0, trains_steps=False).trained == ()
