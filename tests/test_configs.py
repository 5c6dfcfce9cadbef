"""Every preset is locked, plans, and does one real epoch; every field of the base is read."""

import inspect
import re
from pathlib import Path

import pytest

import config.grpo
from config import base
from flow_grpo import cli, session
from flow_grpo.metrics import flatten
from flow_grpo.old_names import OLD_NAMES

ROOT = Path(__file__).resolve().parents[1]
PRESETS = [
    name
    for name, function in inspect.getmembers(config.grpo, inspect.isfunction)
    if function.__module__ == "config.grpo" and name != "get_config"
]
# Ranks that a preset's name or first line speaks of.
RANKS = {"general_ocr_sd3": 32, "general_ocr_sd3_4gpu": 4}
WORLD_SIZES = (1, 8, 32)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_locked_everywhere_and_named(name):
    found = config.grpo.get_config(name)
    assert found.run_name == name
    sections = [found, *(v for v in found.values() if hasattr(v, "is_locked"))]
    assert len(sections) > 5
    assert all(section.is_locked for section in sections)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_in_one_line_what_it_is_for(name):
    assert re.match(r"[`A-Z].+[.:]", inspect.getdoc(getattr(config.grpo, name)).splitlines()[0])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_only_the_fields_of_the_base(name):
    found = flatten(config.grpo.get_config(name).to_dict())
    known = flatten(base.locked_config().to_dict())
    assert {k for k in found if not k.startswith("reward_fn.")} == {
        k for k in known if not k.startswith("reward_fn.")
    }


def test_presets_are_made_anew_each_time():
    config.grpo.get_config("tiny_ocr").seed = 7
    assert config.grpo.get_config("tiny_ocr").seed == 42


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_plans_for_its_ranks_and_those_that_divide(name):
    planned = []
    for world_size in sorted({*WORLD_SIZES, RANKS.get(name, 1)}):
        settings = config.grpo.get_config(name)
        samples = settings.sample.groups_per_epoch * settings.sample.group_size
        if samples % world_size == 0:
            plan = session.check_config(settings, world_size)
            assert plan.samples_per_epoch == samples
            assert plan.rollout_batches * plan.batch_size * world_size == samples
            planned.append(world_size)
    assert RANKS.get(name, 1) in planned


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


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_collects_rewards_and_updates_once(name, train, tiny_sd3_t5_dir, tmp_path):
    settings = config.grpo.get_config(name)
    weights = ",".join(f"{reward}:{w}" for reward, w in settings.reward_fn.items())
    outcome = train(
        f"--config={ROOT / 'config' / 'grpo.py'}:{name}",
        f"--config.pretrained.model={tiny_sd3_t5_dir}", f"--config.logdir={tmp_path}",
        "--config.mixed_precision=no", "--config.resolution=32", "--config.num_epochs=1",
        "--config.sample.groups_per_epoch=2", "--config.sample.group_size=2",
        f"--config.sample.num_steps={min(8, settings.sample.num_steps)}",
        "--config.eval.num_steps=2", "--config.eval.num_prompts=2",
        # Random weights write nothing, so reading them teaches nothing: something to tell apart.
        f"--config.reward_fn={weights},odd_rewards:Contrast:1.0", "--config.trackers=none",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    text = (tmp_path / name / "metrics.jsonl").read_text()
    for reward in settings.reward_fn:
        assert f'"reward/{reward}"' in text
    assert '"train/ratio_dev_first": 0.0' in text
    assert ('"train/kl"' in text) == (settings.train.kl_coef > 0)
    (checkpoint,) = (tmp_path / name / "checkpoints").iterdir()
    assert (checkpoint / "lora" / "pytorch_lora_weights.safetensors").is_file()
