"""The launch scripts hand on what they are given, and two of them train for real."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "scripts" / "single_node").glob("*.sh"))
LAUNCH = [
    "launch", "--quiet", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
# Writes its arguments and its folder down, instead of starting processes.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$PWD" "$@" >"$LOG"
"""


def run(script: Path, *arguments: str, path: Path | str, cwd: Path, **environment: str):
    """Run a script by its absolute path with `path` before PATH."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CONFIG", "SCRIPT", "NUM_PROCESSES")}
    return subprocess.run(
        ["bash", str(script), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120,
        env={**kept, "PATH": f"{path}:{os.environ['PATH']}", **environment},
    )  # fmt: skip


@pytest.fixture
def launched(tmp_path):
    """Return a function that runs a script and returns (folder, arguments) of its launcher."""
    launcher = tmp_path / "bin" / "accelerate"
    launcher.parent.mkdir()
    launcher.write_text(STAND_IN)
    launcher.chmod(0o755)

    def call(script: Path, *arguments: str, **environment: str) -> tuple[str, list[str]]:
        log = tmp_path / "log"
        done = run(
            script, *arguments, path=launcher.parent, cwd=tmp_path, LOG=str(log), **environment
        )
        assert done.returncode == 0, done.stderr
        folder, *given = log.read_text().splitlines()
        return folder, given

    return call


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_launches_its_own_preset_from_the_root(script, launched):
    folder, given = launched(script)
    assert Path(folder) == ROOT
    *launch, train, flag, config = given
    assert launch == [*LAUNCH, "--num_processes", "1"]
    file, preset = config.split(":")
    assert flag == "--config"
    assert train == "scripts/train_sd3.py"
    assert (ROOT / train).is_file()
    assert re.search(rf"^def {preset}\(", (ROOT / file).read_text(), flags=re.M)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_can_be_told_what_to_launch_and_hands_on_every_argument(script, launched):
    settings = {"CONFIG": "mine.py:a b", "SCRIPT": "other.py", "NUM_PROCESSES": "4"}
    _, given = launched(script, "--config.run_name=two words", "--dry_run", **settings)
    assert given == [
        *LAUNCH, "--num_processes", "4", "--multi_gpu", "other.py", "--config", "mine.py:a b",
        "--config.run_name=two words", "--dry_run",
    ]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_executable_and_fails_when_its_launcher_does(script, tmp_path):
    assert script.stat().st_mode & stat.S_IXUSR
    launcher = tmp_path / "accelerate"
    launcher.write_text("#!/usr/bin/env bash\nexit 3\n")
    launcher.chmod(0o755)
    assert run(script, path=tmp_path, cwd=tmp_path).returncode == 3


@pytest.mark.parametrize("method", ["dpo", "sft"])
def test_a_script_trains(method, tiny_sd3_dir, tmp_path):
    done = run(
        ROOT / "scripts" / "single_node" / f"{method}.sh",
        f"--config.pretrained.model={tiny_sd3_dir}", f"--config.logdir={tmp_path}",
        "--config.resolution=32", "--config.num_epochs=1", "--config.trackers=none",
        "--config.sample.groups_per_epoch=4", "--config.sample.group_size=4",
        "--config.train.updates_per_epoch=2", "--config.train.draws_per_sample=2",
        "--config.eval.num_steps=2", "--config.eval.num_prompts=4",
        "--config.reward_fn=odd_rewards:Contrast:1.0",
        path=Path(sys.executable).parent, cwd=tmp_path,
        CONFIG=f"config/{method}.py:tiny_{method}",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        CUDA_VISIBLE_DEVICES="", HF_HOME=str(tmp_path / "hf"),  # no launcher settings of a user
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"***** tiny_{method}: {method} *****" in done.stderr
    folder = tmp_path / f"tiny_{method}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (epoch,) = [line for line in lines if "reward/total" in line]
    assert epoch["train/grad_norm"] > 0
    assert (folder / "checkpoints" / "checkpoint-1" / "lora").is_dir()
    assert "report:" in done.stdout


def test_a_mistake_is_one_line_without_the_launchers_trace(tmp_path):
    done = run(
        ROOT / "scripts" / "single_node" / "dpo.sh", "--config.train.clip_range=0.1", "--dry_run",
        path=Path(sys.executable).parent, cwd=tmp_path, CONFIG="config/dpo.py:tiny_dpo",
        CUDA_VISIBLE_DEVICES="", HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert "warning" not in (done.stderr + done.stdout).lower()
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("error: algorithm 'dpo' does not read train.clip_range (0.1; default")
