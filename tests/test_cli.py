"""What the command line shows, takes and leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flow_grpo import checkpoint, cli, resume, session
from flow_grpo.metrics import flatten

ROOT = Path(__file__).resolve().parents[1]
PRESET = ["--config", "config/grpo.py:tiny_ocr"]
ENVIRONMENT = {
    **os.environ,
    "ACCELERATE_USE_CPU": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}


def parse(*arguments: str):
    return cli.parse(["train", "--config", f"{ROOT / 'config' / 'grpo.py'}:tiny_ocr", *arguments])


def test_print_config_shows_every_field_and_its_value(train):
    outcome = train(*PRESET, "--config.train.learning_rate=0.5", "--print_config")
    assert outcome.code == 0
    shown = dict(line.split("=", 1) for line in outcome.out.splitlines())
    shown = {key.strip(): value.strip() for key, value in shown.items()}
    expected = flatten(parse("--config.train.learning_rate=0.5").to_dict())
    assert set(shown) == {f"config.{key}" for key in expected}
    assert shown["config.train.learning_rate"] == "0.5"
    assert shown["config.sample.sde_type"] == "'cps'"


def test_dry_run_shows_the_plan_and_touches_nothing(train, tmp_path):
    outcome = train(*PRESET, "--dry_run", f"--config.logdir={tmp_path}",
                    "--config.sample.groups_per_epoch=6", "--config.sample.group_size=4",
                    "--config.sample.batch_size=5",
                    "--config.pretrained.model=owner/never_downloaded")  # fmt: skip
    assert outcome.code == 0, outcome.err
    # 24 images; the largest divisor of 24 not above 5 is 4
    assert "6 groups x 4 = 24; per rank (1) 24 in 6 batches of 4" in outcome.out
    assert "optimizer steps per epoch = 4 (updates_per_epoch 4, num_inner" in outcome.out
    assert "rewards = ocr (1.0)" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_plans_for_the_ranks_it_is_started_on(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    outcome = train(*PRESET, "--dry_run", "--config.sample.groups_per_epoch=16",
                    "--config.sample.group_size=12")  # fmt: skip
    assert "per rank (4) 48 in" in outcome.out


def test_help_names_the_flags(train):
    outcome = train("--help")
    assert outcome.code == 0
    for flag in ("--config ", "--config.KEY=VALUE", "--config.reward_fn", "--print_config"):
        assert flag in outcome.out


def test_rewards_are_mixed_on_the_command_line():
    found = parse("--config.reward_fn=ocr:0.8,jpeg_compressibility:0.2")
    assert found.reward_fn.to_dict() == {"ocr": 0.8, "jpeg_compressibility": 0.2}
    found = parse("--config.reward_fn={'ocr': 0.5}")
    assert found.reward_fn.to_dict() == {"ocr": 0.5}
    assert parse("--config.reward_fn.ocr=0.3").reward_fn.ocr == 0.3


def test_a_reward_of_ones_own_is_a_dotted_path():
    found = parse("--config.reward_fn=my_package.sharp:Sharp:1.0")
    assert found.reward_fn.to_dict() == {"my_package/sharp:Sharp": 1.0}
    from flow_grpo.settings import reward_weights

    assert reward_weights(found) == {"my_package.sharp:Sharp": 1.0}


@pytest.mark.parametrize("text", ["(1,4)", "(1, 4)", "1,4", "[1,4]"])
def test_tuples_are_written_as_one_likes(text):
    assert parse(f"--config.sample.sde_window_range={text}").sample.sde_window_range == (1, 4)


@pytest.mark.parametrize(
    ("text", "trackers"),
    [("wandb,tensorboard", ("wandb", "tensorboard")), ("wandb", ("wandb",)), ("()", ()), ("", ())],
)
def test_names_are_separated_by_commas(text, trackers):
    assert parse(f"--config.trackers={text}").trackers == trackers


def test_of_a_flag_given_twice_the_last_counts():
    found = parse("--config.sample.sde_window_range=0,3", "--config.sample.sde_window_range=1,4",
                  "--config.num_epochs=3", "--config.num_epochs=5",
                  "--config.reward_fn=ocr:1",
                  "--config.reward_fn=jpeg_compressibility:1")  # fmt: skip
    assert found.sample.sde_window_range == (1, 4)
    assert found.num_epochs == 5
    assert found.reward_fn.to_dict() == {"jpeg_compressibility": 1.0}


def test_overrides_keep_the_type_of_the_field_and_the_lock():
    found = parse("--config.sample.noise_level=1", "--noconfig.sample.global_std",
                  "--config.use_lora=False")  # fmt: skip
    assert found.sample.noise_level == 1.0
    assert found.sample.global_std is found.use_lora is False
    with pytest.raises(AttributeError):
        found.train.learning_rat = 1.0


def test_a_run_leaves_all_that_people_look_at(tiny_arguments, train, tmp_path):
    outcome = train(*tiny_arguments, "--config.trackers=tensorboard")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs" / "run"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "samples", "checkpoints", "report.html",
                     "summary.json", "tensorboard"}  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {"eval_before", "eval_after", "epochs", "images", "seconds",
                            "images_per_s", "peak_memory_gib", "ratio_dev_first_max", "versions",
                            "commit"}  # fmt: skip
    assert summary["epochs"] == 2
    assert summary["images"] == 32
    assert summary["ratio_dev_first_max"] == 0.0
    assert summary["peak_memory_gib"] > 0.1
    last = outcome.out.splitlines()
    assert last[0].startswith("held-out jpeg_compressibility: ")
    assert last[-1] == f"report: {folder / 'report.html'}"


def test_a_finished_run_says_so_and_a_longer_one_goes_on(tiny_arguments, train, tmp_path):
    assert train(*tiny_arguments).code == 0
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    before = metrics.read_text()
    again = train(*tiny_arguments)
    assert again.code == 0
    assert "run has finished its 2 epochs" in again.err
    assert "held-out jpeg_compressibility: " in again.out
    assert metrics.read_text() == before
    longer = train(*tiny_arguments, "--config.num_epochs=3", "--config.sample.batch_size=4")
    assert longer.code == 0
    assert "resumed from" in longer.err
    assert metrics.read_text().startswith(before)
    assert '{"epoch": 3, "update": 6, "eval/' in metrics.read_text()


def test_a_resumed_run_remembers_where_it_was_and_its_best(
    tiny_arguments, tiny_config, train, make_run, tmp_path
):
    assert train(*tiny_arguments).code == 0
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    totals = [line["eval/total"] for line in lines if "eval/total" in line][1:]
    run = make_run(tiny_config)
    assert resume.restore(run) == metrics.stat().st_size
    assert run.state == session.TrainState(epoch=2, update=4)
    assert run.best_total == max(totals)


def test_controls_permute_and_flip_what_is_learned_from(tiny_arguments, train, tmp_path):
    moved = {}
    for control in ("none", "permute_rewards", "flip_advantages"):
        outcome = train(
            *tiny_arguments, f"--config.control={control}", f"--config.run_name={control}",
            "--config.num_epochs=1", "--config.train.updates_per_epoch=1",
            "--config.reward_fn=odd_rewards:Contrast:1.0", "--config.train.adam_weight_decay=0.0",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        state = tmp_path / "runs" / control / "checkpoints" / "checkpoint-1" / "state"
        tensors = load_file(state / "parameters.safetensors")
        moved[control] = tensors[next(name for name in tensors if "lora_B" in name)]
    # B starts at 0 and Adam's first step goes by the gradient's sign, which the flip turns.
    assert moved["none"].abs().max() > 0
    assert (moved["none"] + moved["flip_advantages"]).abs().max() < 1e-9
    assert (moved["none"] - moved["permute_rewards"]).abs().max() > 1e-6


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "scripts/train_sd3.py", *arguments],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.fixture
def slow_arguments(tiny_arguments) -> list[str]:
    return [*tiny_arguments, "--config.reward_fn=odd_rewards:Slow:1.0", "--config.num_epochs=50",
            "--config.save_freq=50", "--config.eval_freq=50",
            "--config.eval.num_prompts=1"]  # fmt: skip


def test_ctrl_c_finishes_the_epoch_and_saves(slow_arguments, tmp_path):
    folder = tmp_path / "runs" / "run"
    process = start(slow_arguments)
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and '"reward/total"' in metrics.read_text(), process)
    time.sleep(0.2)  # into the next epoch, whose rewards take longer than that
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "this epoch is finished and saved first" in err
    assert "Traceback" not in err
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    num_epochs = sum("reward/total" in line for line in lines)
    assert 2 <= num_epochs < 50
    path, manifest = checkpoint.newest(folder / "checkpoints")
    assert path.name == f"checkpoint-{num_epochs}"
    assert manifest["metrics_bytes"] == metrics.stat().st_size
    assert f"{num_epochs} epochs" in out
    assert (folder / "report.html").is_file()


def test_a_second_ctrl_c_stops_at_once(slow_arguments, tmp_path):
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    process = start(slow_arguments)
    wait_for(lambda: metrics.is_file() and '"reward/total"' in metrics.read_text(), process)
    time.sleep(0.2)  # into the next epoch, whose rewards take longer than that
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command resumes" in err
    assert "Traceback" not in err
    assert checkpoint.newest(tmp_path / "runs" / "run" / "checkpoints") is None


def test_a_script_started_from_anywhere_ends_with_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "train_sd3.py"),
               "--config", f"{ROOT / 'config' / 'grpo.py'}:tiny_ocrr"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: unknown preset 'tiny_ocrr'")
