"""Every preset is locked, plans, and does one real epoch; every field of the base is read."""

import importlib
import inspect
import re
from pathlib import Path

import families
import pytest
from families import family_of
from ml_collections import ConfigDict
from safetensors.torch import load_file

import config.grpo
from config import base
from flow_grpo import cli, session
from flow_grpo.metrics import flatten
from flow_grpo.old_names import OLD_NAMES

ROOT = Path(__file__).resolve().parents[1]
NO_PRESETS = ("__init__", "base", "grpo_families", "models", "tasks")  # what presets are made of
FILES = {
    path.stem: importlib.import_module(f"config.{path.stem}")
    for path in sorted((ROOT / "config").glob("*.py"))
    if path.stem not in NO_PRESETS
}
PRESETS = [
    (file, name)
    for file, module in FILES.items()
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ != "config.base" and name != "get_config" and name[0] != "_"
]
every_preset = pytest.mark.parametrize(("file", "name"), PRESETS, ids=map(":".join, PRESETS))
WORLD_SIZES = (1, 8, 32)
# Rewards whose model is not in the repository: a download or a server.
OUTSIDE = ("geneval", "pickscore", "clipscore")
RATIOS = ("grpo", "grpo_guard")  # algorithms that compare the policy with the collecting one


def first_line(file: str, name: str) -> str:
    return inspect.getdoc(getattr(FILES[file], name)).splitlines()[0]


def own_ranks(file: str, name: str) -> int:
    """Return the processes that a preset's first line speaks of."""
    gpus = re.findall(r"(\d+) GPU", first_line(file, name))
    return int(gpus[0]) if gpus else 1


def usable_rewards(settings: ConfigDict) -> dict[str, float]:
    return {name: w for name, w in settings.reward_fn.items() if name not in OUTSIDE}


@every_preset
def test_every_preset_is_locked_everywhere_and_named(file, name):
    found = FILES[file].get_config(name)
    assert found.run_name == name
    sections = [found, *(v for v in found.values() if hasattr(v, "is_locked"))]
    assert len(sections) > 5
    assert all(section.is_locked for section in sections)


@every_preset
def test_every_preset_says_in_one_line_what_it_is_for_and_on_what(file, name):
    assert re.match(r"[`A-Z].+\b\d+ (GPU|CPU core)s?\b.*[.:]$", first_line(file, name))


@pytest.mark.parametrize("file", FILES)
def test_a_file_without_a_presets_name_gives_its_own_small_one(file):
    found = FILES[file].get_config()
    assert found.run_name.startswith("tiny_")
    assert found.algorithm == file


@every_preset
def test_a_preset_learns_as_its_file_and_its_name_say(file, name):
    found = FILES[file].get_config(name)
    named = [variant for variant in ("rwr", "grpo_guard") if variant in name]
    assert found.algorithm == (named[0] if named else file)
    if file in ("dpo", "sft"):
        assert (found.train.old_update_freq > 0) == ("online" in name)
    assert ("sd3_fast" in name and "nocfg" not in name) <= found.sample.branching


@every_preset
def test_presets_have_only_the_fields_of_the_base(file, name):
    found = flatten(FILES[file].get_config(name).to_dict())
    known = flatten(base.locked_config().to_dict())
    assert {k for k in found if not k.startswith("reward_fn.")} == {
        k for k in known if not k.startswith("reward_fn.")
    }


def test_presets_are_made_anew_each_time():
    config.grpo.get_config("tiny_ocr").seed = 7
    assert config.grpo.get_config("tiny_ocr").seed == 42


@every_preset
def test_every_preset_plans_for_its_ranks_and_those_that_divide(file, name):
    planned = []
    for world_size in sorted({*WORLD_SIZES, own_ranks(file, name)}):
        settings = FILES[file].get_config(name)
        settings.reward_fn = {**usable_rewards(settings), "jpeg_compressibility": 1.0}
        samples = settings.sample.groups_per_epoch * settings.sample.group_size
        if samples % world_size == 0:
            plan = session.check_config(settings, world_size)
            assert plan.samples_per_epoch == samples
            assert plan.rollout_batches * plan.batch_size * world_size == samples
            planned.append(world_size)
    assert own_ranks(file, name) in planned
    assert 1 in planned


# Ranks, images a batch, images a prompt, batches, accumulated batches: as published.
PUBLISHED = {
    ("grpo", "general_ocr_sd3"): (32, 9, 24, 4, 2),
    ("grpo", "geneval_sd3"): (32, 9, 24, 4, 2),
    ("grpo", "pickscore_sd3"): (32, 9, 24, 4, 2),
    ("grpo", "clipscore_sd3"): (32, 9, 24, 4, 2),
    ("grpo", "geneval_sd3_fast_nocfg"): (32, 9, 24, 4, 2),
    ("grpo", "pickscore_sd3_fast_nocfg"): (32, 9, 18, 4, 2),
    ("grpo", "pickscore_sd3_fast"): (32, 9, 18, 4, 2),  # one prompt a batch, 9 images of it
    ("grpo", "general_ocr_sd3_4gpu"): (4, 8, 16, 8, 4),
    ("grpo", "pickscore_sd3_4gpu"): (4, 8, 16, 8, 4),
    ("grpo", "general_ocr_sd3_1gpu"): (1, 8, 8, 8, 4),
    ("grpo", "pickscore_flux"): (32, 3, 24, 12, 6),
    ("grpo", "pickscore_flux_8gpu"): (8, 3, 24, 48, 24),
    ("grpo", "counting_flux_kontext"): (28, 2, 21, 18, 9),  # published: batches of 3
    ("grpo", "geneval_flux_fast"): (32, 3, 24, 12, 6),
    ("grpo", "pickscore_flux_fast"): (32, 3, 24, 12, 6),
    ("grpo_guard", "general_ocr_sd3_rationorm"): (16, 9, 24, 8, 4),
    ("grpo_guard", "pickscore_hps_sd3_ratio_norm"): (16, 9, 24, 8, 4),
    ("grpo_guard", "geneval_sd3_rationorm"): (16, 9, 24, 8, 4),
    ("grpo", "general_ocr_wan2_1"): (1, 8, 4, 2, 1),
    ("grpo", "pickscore_qwenimage"): (32, 4, 16, 4, 2),
    ("grpo", "pickscore_qwenimage_8gpu"): (8, 4, 16, 16, 8),
    ("grpo", "counting_qwenimage_edit"): (32, 4, 16, 4, 2),
    ("grpo", "counting_qwenimage_edit_fast"): (32, 4, 16, 4, 2),
    ("grpo", "counting_qwenimage_edit_8gpu"): (8, 4, 16, 16, 8),
    ("dpo", "geneval_sd3"): (32, 24, 24, 1, 1),
    ("dpo", "pickscore_sd3"): (32, 24, 24, 1, 1),
    ("sft", "geneval_sd3"): (32, 24, 24, 1, 1),
    ("sft", "pickscore_sd3"): (32, 24, 24, 1, 1),
}


@pytest.mark.parametrize(("file", "name"), PUBLISHED, ids=map(":".join, PUBLISHED))
def test_a_published_preset_cuts_its_epoch_as_the_original_does(file, name):
    ranks, batch, group, batches, accumulated = PUBLISHED[file, name]
    settings = FILES[file].get_config(name)
    settings.reward_fn = {"jpeg_compressibility": 1.0}
    plan = session.check_config(settings, ranks)
    assert (plan.group_size, plan.batch_size, plan.rollout_batches) == (group, batch, batches)
    assert plan.updates_per_epoch == batches // accumulated
    assert own_ranks(file, name) == ranks


def test_the_papers_shape_is_the_default():
    settings = base.locked_config()
    assert settings.sample.groups_per_epoch == 48
    assert settings.sample.group_size == 24
    assert settings.train.updates_per_epoch == 2
    settings.run_name = "paper"
    # One forward of 9 images on each of 32 ranks, four times: 1152 images.
    assert session.check_config(settings, 32).rollout_batches == 4


BROKEN = """\
from config.base import locked_config, preset

def typo():
    config = locked_config()
    config.train.learning_rat = 1e-4
    return config

def reward_typo():
    config = locked_config()
    config.reward_fn = {"ocr": 1.0}
    return config

def wrong_type():
    config = locked_config()
    config.num_epochs = "many"
    return config

def get_config(name):
    return preset(globals(), name)
"""


@pytest.fixture
def broken_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    return file


def test_a_typo_in_a_preset_is_named_with_its_line_and_the_nearest_field(broken_file):
    message = r"mine.py:5: .*\"learning_rat\" does not exist.* Did you mean \"learning_rate\""
    with pytest.raises(ValueError, match=message) as caught:
        cli.parse(["train", "--config", f"{broken_file}:typo"])
    assert len(str(caught.value)) < 300  # not the whole configuration


def test_a_value_of_the_wrong_type_in_a_preset_is_named_with_its_line(broken_file):
    with pytest.raises(ValueError, match=r"mine.py:15: .*'num_epochs'.*many"):
        cli.parse(["train", "--config", f"{broken_file}:wrong_type"])


def test_a_dict_given_to_a_field_is_locked_again(broken_file):
    found = cli.parse(["train", "--config", f"{broken_file}:reward_typo"])
    with pytest.raises(AttributeError):
        found.reward_fn.orc = 1.0


# Fields of which a name alone proves little: they are read through these sections.
SECTIONS = {"sample": "sample", "train": "_train|train", "eval": "settings|eval"}


def test_every_field_of_the_base_is_read_somewhere():
    sources = [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.name != "old_names.py")
    unread = []
    for key in flatten(base.locked_config().to_dict()):
        section, _, name = key.rpartition(".")
        if key in OLD_NAMES or section == "reward_fn":
            continue
        holder = SECTIONS.get(section, section or "config")
        if not re.search(rf"\b(?:{holder})\.{name}\b|\b(?:{holder})\[.{name}.\]", text) and not (
            re.search(rf"[\"']{re.escape(key)}[\"']", text) and not section
        ):
            unread.append(key)
    assert unread == []


def small(settings: ConfigDict) -> list[str]:
    """Return overrides of sizes and counts alone: the sampler, the window and the KL stay."""
    sample, group_size = settings.sample, 2
    overrides = {
        "mixed_precision": "no", "resolution": 32, "width": 0, "num_frames": 5,
        "reference_resolution": 64,
        "num_epochs": 1, "trackers": "none",
        "sample.num_steps": min(8, sample.num_steps), "sample.groups_per_epoch": 2,
        "train.updates_per_epoch": min(2, settings.train.updates_per_epoch),
        "eval.num_steps": 2, "eval.num_prompts": 2, "reward.num_workers": 1,
    }  # fmt: skip
    if sample.mini_group_size:
        group_size = 4
        overrides["sample.mini_group_size"] = 2
    if settings.train.draws_per_sample > 2:
        overrides["train.draws_per_sample"] = 2
    overrides["sample.group_size"] = group_size
    # Random weights write nothing, so reading them teaches nothing: something to tell apart.
    rewards = {**usable_rewards(settings), "odd_rewards:Contrast": 1.0}
    overrides["reward_fn"] = ",".join(f"{name}:{weight}" for name, weight in rewards.items())
    return [f"--config.{key}={value}" for key, value in overrides.items()]


@every_preset
def test_every_preset_collects_rewards_and_updates_once(
    file, name, train, tiny_dir, tiny_clip_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLOW_GRPO_CLIP", tiny_clip_dir)
    settings = FILES[file].get_config(name)
    name_of = family_of(settings.pretrained.model)
    adapter = families.adapter(name_of)
    outcome = train(
        f"--config={ROOT / 'config' / file}.py:{name}", *small(settings),
        f"--config.pretrained.model={tiny_dir(name_of)}",
        f"--config.logdir={tmp_path}", adapter=adapter,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert f"***** {name}: {settings.algorithm} *****" in outcome.err
    text = (tmp_path / name / "metrics.jsonl").read_text()
    for reward, weight in usable_rewards(settings).items():
        assert f'"{"reward" if weight else "eval"}/{reward}"' in text
    assert ('"train/ratio_dev_first": 0.0' in text) == (settings.algorithm in RATIOS)
    assert ('"train/kl"' in text) == (settings.train.kl_coef > 0)
    (checkpoint,) = (tmp_path / name / "checkpoints").iterdir()
    adapter = load_file(checkpoint / "lora" / "pytorch_lora_weights.safetensors")
    # B starts at 0: an update was made, and of more than one matrix.
    assert sum(bool(t.any()) for key, t in adapter.items() if "lora_B" in key) > 1
