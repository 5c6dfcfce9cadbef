"""Every launch script trains: on one machine, and as two launchers that meet on loopback."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from launch_scripts import MULTI, ROOT, SCRIPTS, SINGLE, environment, finished, run, start

BIN = Path(sys.executable).parent
TRAINS_ON_ONE = "test_a_script_trains_on_this_machine"
IN_THE_FAST_SUITE = "multi_node/sd3.sh"
CONFIGURATION = "scripts/accelerate_configs/multi_gpu.yaml"
GUIDE = (
    f"accelerate launch --config_file {CONFIGURATION} --num_processes=1 --main_process_port 29503 "
    "scripts/train_wan2_1.py --config config/grpo.py:general_ocr_wan2_1"
)
# An epoch of 16 images, for one process or two.
SMALL = (
    "--config.num_epochs=1", "--config.trackers=none", "--config.mixed_precision=no",
    "--config.reward_fn=odd_rewards:Contrast:1.0", "--config.run_name=run",
    "--config.resolution=32", "--config.width=0", "--config.num_frames=5",
    "--config.reference_resolution=64",
    "--config.sample.groups_per_epoch=4", "--config.sample.group_size=4",
    "--config.sample.num_steps=6", "--config.sample.max_sequence_length=32",
    "--config.eval.num_steps=2", "--config.eval.num_prompts=2", "--config.eval.num_samples=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def start_small(request):
    """Return a function that starts a script on a tiny pipeline, for a run `folder`/run."""

    def call(script: str, *arguments: str, folder: Path, **settings: str):
        pipeline = request.getfixturevalue("tiny_dir")(SCRIPTS[script].train)
        return start(
            script, *arguments, f"--config.pretrained.model={pipeline}",
            f"--config.logdir={folder}", *SMALL,
            path=BIN, cwd=folder, CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            HF_HOME=str(folder / "hf"),  # no launcher settings of a user
            **settings,
        )  # fmt: skip

    return call


@pytest.fixture(scope="module")
def single_runs(request, start_small, tmp_path_factory):
    """Run every single-node script that is asked for, two at a time: {script: (folder, future)}."""
    items = [i for i in request.session.items if i.originalname == TRAINS_ON_ONE]
    with ThreadPoolExecutor(2) as pool:
        runs = {}
        for script in (item.callspec.params["script"] for item in items):
            request.getfixturevalue("tiny_dir")(SCRIPTS[script].train)  # not in a thread
            folder = tmp_path_factory.mktemp(Path(script).stem)

            def train(script=script, folder=folder):
                return finished(start_small(script, folder=folder, NUM_PROCESSES="1"))

            runs[script] = folder, pool.submit(train)
        yield runs


def check_epoch(folder: Path, err: str, world_size: int) -> None:
    """Assert that so many processes trained an epoch that learned something."""
    assert f"per rank ({world_size}) {16 // world_size} in" in err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (epoch,) = [line for line in lines if "reward/total" in line]
    assert epoch["train/grad_norm"] > 0
    assert (folder / "checkpoints" / "checkpoint-1" / "lora").is_dir()
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize("script", SINGLE)
def test_a_script_trains_on_this_machine(script, single_runs):
    folder, future = single_runs[script]
    done = future.result()
    assert done.returncode == 0, done.stderr
    check_epoch(folder / "run", done.stderr, 1)
    assert "report:" in done.stdout


@pytest.mark.parametrize(
    "script",
    [s if s == IN_THE_FAST_SUITE else pytest.param(s, marks=pytest.mark.slow) for s in MULTI],
)
def test_two_machines_train_together(script, start_small, tmp_path):
    settings = {"NUM_MACHINES": "2", "NUM_PROCESSES": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings["MASTER_PORT"] = str(free.getsockname()[1])
    machines = [start_small(script, rank, folder=tmp_path, **settings) for rank in ("1", "0")]
    other, first = [finished(machine) for machine in machines]
    assert (first.returncode, other.returncode) == (0, 0), first.stderr + other.stderr
    check_epoch(tmp_path / "run", first.stderr, 2)
    assert "report:" in first.stdout
    assert (other.stdout, other.stderr) == ("", "")


@pytest.mark.slow
def test_two_processes_of_one_machine_train_without_a_gpu(start_small, tmp_path):
    done = finished(start_small("single_node/grpo.sh", folder=tmp_path, NUM_PROCESSES="2"))
    assert done.returncode == 0, done.stderr
    check_epoch(tmp_path / "run", done.stderr, 2)


def test_numbers_and_precision_of_a_configuration_of_accelerate_do_not_count(tmp_path):
    file, script = tmp_path / "eight.yaml", tmp_path / "script.py"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\n"
        "num_machines: 3\nnum_processes: 24\nmachine_rank: 2\nmain_process_ip: nowhere\n"
        "main_process_port: 1\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
    )
    names = ("WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
    names += ("ACCELERATE_DYNAMO_BACKEND", "FLOW_GRPO_NUM_PROCESSES")
    script.write_text(
        f"import os, sys\nsys.stdout.write(' '.join(os.environ[n] for n in {names}) + '\\n')\n"
    )
    done = run(
        "single_node/grpo.sh", path=BIN, cwd=tmp_path, HF_HOME=str(tmp_path),
        ACCELERATE_CONFIG=str(file), NUM_PROCESSES="2", SCRIPT=str(script),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2 0 1 no NO 2"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_guides_command_for_wan_runs_at_the_presets_precision(precision, tiny_dir, tmp_path):
    """The configuration's fp16 would stop the run: accelerate has it on a GPU only."""
    file, text = tmp_path / "multi_gpu.yaml", (ROOT / CONFIGURATION).read_text()
    file.write_text(text.replace('mixed_precision: "no"', f'mixed_precision: "{precision}"'))
    assert f'mixed_precision: "{precision}"' in file.read_text()
    command = GUIDE if precision == "no" else GUIDE.replace(CONFIGURATION, str(file))
    small = [s for s in SMALL if "mixed_precision" not in s]  # the preset's is bf16
    small += [f"--config.pretrained.model={tiny_dir('wan2_1')}", f"--config.logdir={tmp_path}"]
    done = subprocess.run(
        [*command.split(), *small], cwd=ROOT, capture_output=True, text=True, timeout=400,
        env=environment(
            BIN, CUDA_VISIBLE_DEVICES="", HF_HOME=str(tmp_path),
            PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_epoch(tmp_path / "run", done.stderr, 1)
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["mixed_precision"] == "bf16"


def test_processes_that_did_not_start_are_an_error(tmp_path):
    """`--cpu` starts one process, whatever is asked for."""
    script = tmp_path / "script.py"
    script.write_text("from flow_grpo import processes\n\nprocesses.check_processes(1)\n")
    done = subprocess.run(
        ["accelerate", "launch", "--cpu", "--num_processes", "2", str(script)], cwd=tmp_path,
        capture_output=True, text=True, timeout=120,
        env=environment(BIN, PYTHONPATH=str(ROOT), HF_HOME=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: accelerate launch was asked for several processes and" in done.stderr


def test_a_mistake_is_one_line_without_the_launchers_trace(tmp_path):
    done = run(
        "single_node/dpo.sh", "--config.train.clip_range=0.1", "--dry_run", path=BIN, cwd=tmp_path,
        CONFIG="config/dpo.py:tiny_dpo", CUDA_VISIBLE_DEVICES="", HF_HOME=str(tmp_path / "hf"),
        PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert "warning" not in (done.stderr + done.stdout).lower()
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("error: algorithm 'dpo' does not read train.clip_range (0.1; default")


@pytest.mark.slow
def test_a_mistake_is_said_once_and_last_by_several_processes(tmp_path):
    done = run(
        "single_node/grpo.sh", "--config.typo=1", "--dry_run", path=BIN, cwd=tmp_path,
        NUM_PROCESSES="2", PYTHONPATH=str(ROOT), HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip("=-")]
    assert [line for line in lines if line.startswith("error: ")] == [lines[0]]
    assert lines[0].startswith("error: unknown key config.typo")
    assert lines[-1].endswith(lines[0])
