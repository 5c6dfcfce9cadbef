"""The reference's field names mean the same numbers here. W ranks, b images, nb batches, k a group:
groups = W * b * nb / k, updates = nb / ga.
"""

import pytest

from config.base import locked_config
from flow_grpo.old_names import OLD_NAMES, translate_old_names


def translated(world_size: int = 1, **given):
    """Return (config, messages) with old names given as section__name=value."""
    config = locked_config()
    for key, value in given.items():
        *section, name = key.split("__")
        (config[section[0]] if section else config)[name] = value
    return config, translate_old_names(config, world_size)


def test_nothing_given_changes_nothing():
    config, messages = translated()
    assert messages == {}
    assert config.to_dict() == locked_config().to_dict()


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("train__beta", "train__kl_coef", 0.04),
        ("sample__num_image_per_prompt", "sample__group_size", 16),
        ("sample__test_batch_size", "eval__batch_size", 5),
        ("sample__eval_num_steps", "eval__num_steps", 28),
        ("sample__eval_guidance_scale", "eval__guidance_scale", 1.5),
        ("sample__mini_num_image_per_prompt", "sample__mini_group_size", 9),
        ("sample__train_num_steps", "sample__sde_window_size", 2),
        ("train__clip_range_lt", "train__clip_range", 1e-5),
        ("train__clip_range_gt", "train__clip_range_high", 2e-5),
        ("train__ref_update_step", "train__old_update_freq", 40),
        ("train__algorithm", "algorithm", "sft"),
    ],
)
def test_a_renamed_field_is_written_and_logged_under_its_new_name(old, new, value):
    config, messages = translated(**{old: value})
    *section, name = new.split("__")
    assert (config[section[0]] if section else config)[name] == value
    told = {name: text.partition(" (")[0] for name, text in messages.items()}
    assert told == {old.replace("__", "."): f"{new.replace('__', '.')} = {value}"}


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({}, True),
        ({"train__kl_scale": "reference"}, False),
        ({"sample__sde_type": "cps"}, False),  # whose KL the original code has right
        ({"algorithm": "sft"}, False),
    ],
)
def test_a_published_beta_comes_with_a_word_on_the_scale_of_its_kl(settings, hint):
    _, messages = translated(train__beta=0.04, **settings)
    assert ("train.kl_scale=reference gives the KL its old value" in str(messages)) == hint


@pytest.mark.parametrize(
    ("algorithm", "kl_coef", "dpo_beta"),
    # DPO's train.beta is the strength in its sigmoid; everyone else's is the weight of a KL.
    [("dpo", 0.0, 7.0), ("sft", 7.0, 100.0), ("grpo", 7.0, 100.0)],
)
@pytest.mark.parametrize("name", ["algorithm", "train__algorithm"])
def test_beta_means_what_the_algorithm_calls_beta(algorithm, kl_coef, dpo_beta, name):
    config = locked_config()
    if name == "algorithm":
        config.algorithm = algorithm
    else:
        config.train.algorithm = algorithm
    config.train.beta = 7.0
    messages = translate_old_names(config, 1)
    assert (config.train.kl_coef, config.train.dpo_beta) == (kl_coef, dpo_beta)
    assert messages["train.beta"].split(" = ")[0] == (
        "train.dpo_beta" if algorithm == "dpo" else "train.kl_coef"
    )


def test_the_references_offline_step_is_never_reached_here_either():
    config, _ = translated(train__ref_update_step=10_000_000)
    assert config.train.old_update_freq == 10_000_000


def test_all_old_fields_are_unset_afterwards():
    config, _ = translated(
        train__beta=0.1, train__algorithm="sft", sample__train_batch_size=9, train__batch_size=9
    )
    for name in OLD_NAMES:
        section, leaf = name.split(".")
        assert config[section][leaf] is None
    assert translate_old_names(config, 1) == {}


@pytest.mark.parametrize(
    ("world_size", "batch", "batches", "accumulation", "groups", "updates"),
    [
        (32, 9, 4, 2, 48, 2),  # the guide's 32-GPU shape: 9 * 32 / 24 * 4 = 48 groups, ga = nb // 2
        (1, 9, 128, 64, 48, 2),  # the same on one GPU
        (8, 6, 24, 12, 48, 2),
        (1, 24, 1, 1, 1, 1),  # on policy: one batch, one update
    ],
)
def test_per_rank_numbers_become_global_ones(
    world_size, batch, batches, accumulation, groups, updates
):
    config, messages = translated(
        world_size,
        sample__train_batch_size=batch,
        sample__num_image_per_prompt=24,
        sample__num_batches_per_epoch=batches,
        train__batch_size=batch,
        train__gradient_accumulation_steps=accumulation,
    )
    assert config.sample.batch_size == batch
    assert config.sample.groups_per_epoch == groups
    assert config.train.updates_per_epoch == updates
    assert messages["sample.num_batches_per_epoch"] == f"sample.groups_per_epoch = {groups}"
    assert messages["train.gradient_accumulation_steps"] == f"train.updates_per_epoch = {updates}"


def test_accumulation_alone_counts_the_batches_that_the_epoch_has():
    # 48 * 24 images in batches of 9 on 4 ranks are 32 batches a rank; 8 of them an update.
    config, _ = translated(4, train__gradient_accumulation_steps=8)
    assert config.train.updates_per_epoch == 4
    assert config.sample.groups_per_epoch == 48


def test_the_references_name_of_the_sde_is_known():
    config, messages = translated(sample__sde_type="sde")
    assert config.sample.sde_type == "flow_sde"
    assert messages == {"sample.sde_type = sde": "sample.sde_type = flow_sde"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sample__num_batches_per_epoch": 3, "sample__num_image_per_prompt": 5},
            r"num_batches_per_epoch \(3\) \* batch size \(9\) \* world_size \(1\) = 27 images are "
            r"no whole number of groups of 5; .* nearest valid: 5",
        ),
        (
            {"sample__num_batches_per_epoch": 8, "train__gradient_accumulation_steps": 3,
             "sample__num_image_per_prompt": 3},
            r"gradient_accumulation_steps \(3\) does not divide the 8 batches .* nearest valid: 2",
        ),
        (
            {"sample__num_batches_per_epoch": 8, "train__gradient_accumulation_steps": 0},
            r"gradient_accumulation_steps \(0\) must be at least 1",
        ),
        (
            {"sample__train_batch_size": 8, "train__batch_size": 4},
            r"sample.train_batch_size \(8\) and train.batch_size \(4\) differ",
        ),
        ({"sample__train_batch_size": 0}, r"sample.train_batch_size \(0\) must be at least 1"),
        ({"sample__num_batches_per_epoch": 0}, r"num_batches_per_epoch \(0\) must be at least 1"),
        ({"sample__num_image_per_prompt": 0, "sample__num_batches_per_epoch": 1},
         r"num_image_per_prompt \(0\) must be at least 1"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_come_out_are_refused_with_the_nearest(given, message):
    with pytest.raises(ValueError, match=message):
        translated(**given)
