"""A folder has one writer and one configuration, and says at the end what came of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from config.base import locked_config
from flow_grpo.run_folder import NOT_IDENTITY, RunFolder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def config(tmp_path):
    config = locked_config()
    config.logdir, config.run_name = str(tmp_path), "run"
    return config


def open_and_close(config, *, started: bool = True) -> RunFolder:
    folder = RunFolder(config)
    if started:
        folder.metrics.write_text('{"epoch": 0}\n')
    folder.close()
    return folder


def test_the_settings_are_there_to_read(config):
    config.sample.sde_window_range = (0, 5)
    folder = open_and_close(config)
    settings = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert settings["train"]["learning_rate"] == config.train.learning_rate
    assert settings["sample"]["sde_window_range"] == [0, 5]
    assert settings["reward_fn"] == {"ocr": 1.0}


def test_the_same_settings_reopen_the_folder(config):
    open_and_close(config)
    open_and_close(config)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [(None, "seed", 7), ("train", "learning_rate", 1e-5), (None, "reward_fn", {"ocr": 0.5})],
)
def test_other_settings_are_refused_and_named(config, section, name, value):
    before = open_and_close(config)
    (config[section] if section else config)[name] = value
    with pytest.raises(ValueError, match=rf"belongs to a run with another config: .*{name}.* -> "):
        RunFolder(config)
    settings = yaml.safe_load((before.path / "config.yaml").read_text())
    assert settings["seed"] == 42
    assert settings["reward_fn"] == {"ocr": 1.0}


def test_how_long_and_how_fast_may_change(config):
    open_and_close(config)
    config.num_epochs, config.sample.batch_size, config.trackers = 77, 3, ("wandb",)
    config.save_freq, config.reward.timeout_s = 5, 3.0
    folder = open_and_close(config)
    assert yaml.safe_load((folder.path / "config.yaml").read_text())["num_epochs"] == 77


def test_what_may_change_are_fields_that_exist():
    from flow_grpo.metrics import flatten

    assert set(flatten(locked_config().to_dict())) >= NOT_IDENTITY


def test_a_folder_in_which_nothing_was_logged_belongs_to_nobody(config):
    open_and_close(config, started=False)  # such as a run whose model path was wrong
    config.seed = 7
    open_and_close(config)


def test_two_writers_are_refused_even_across_processes(config):
    folder = RunFolder(config)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from config.base import locked_config\n"
        "from flow_grpo.run_folder import RunFolder\n"
        "config = locked_config()\n"
        "config.logdir, config.run_name = sys.argv[2], 'run'\n"
        "RunFolder(config)\n"
    )
    command = [sys.executable, "-c", code, str(ROOT), config.logdir]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 1
    assert "another process is training in" in second.stderr
    folder.close()
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def test_a_file_in_place_of_the_folder_is_one_error(config, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is a file"):
        RunFolder(config)


LINES = [
    {"epoch": 0, "update": 0, "eval/ocr": 0.5, "eval/ocr_stderr": 0.01, "eval/total": 0.5,
     "time/eval_s": 1.0},
    {"epoch": 0, "update": 2, "images": 16, "reward/total": 0.4, "train/ratio_dev_first": 0.0,
     "time/rollout_s": 2.0, "time/reward_s": 0.5, "time/update_s": 1.5},
    {"epoch": 1, "update": 2, "images": 16, "reward/total": 0.6},  # an epoch without an update
    {"epoch": 2, "update": 4, "images": 16, "reward/total": 0.6, "train/ratio_dev_first": 1e-6,
     "time/rollout_s": 2.0, "time/reward_s": 0.5, "time/update_s": 1.5},
    {"epoch": 3, "update": 4, "eval/ocr": 0.75, "eval/ocr_stderr": 0.02, "eval/total": 0.75,
     "time/eval_s": 1.0},
]  # fmt: skip


def test_the_summary_says_what_the_metrics_say(config):
    folder = RunFolder(config)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert folder.summary() is None
    summary = folder.write_summary(peak_memory_gib=1.5)
    assert summary == folder.summary()
    assert summary["eval_before"] == {"ocr": 0.5, "ocr_stderr": 0.01, "total": 0.5}
    assert summary["eval_after"] == {"ocr": 0.75, "ocr_stderr": 0.02, "total": 0.75}
    assert summary["epochs"] == 3
    assert summary["images"] == 48
    assert summary["seconds"] == 10.0  # 1 + 4 + 4 + 1
    assert summary["images_per_s"] == 4.8
    assert summary["ratio_dev_first_max"] == 1e-6
    assert summary["peak_memory_gib"] == 1.5
    assert set(summary["versions"]) >= {"python", "torch", "diffusers", "transformers", "peft"}
    assert summary["commit"]
    folder.close()


def test_a_run_without_an_epoch_has_a_summary(config):
    folder = RunFolder(config)
    summary = folder.write_summary()
    assert summary["epochs"] == summary["images"] == 0
    assert summary["eval_before"] is None
    assert summary["images_per_s"] is None
    folder.close()


def test_a_broken_summary_counts_as_none(config):
    folder = RunFolder(config)
    (folder.path / "summary.json").write_text('{"epochs": ')
    assert folder.summary() is None
    folder.close()
