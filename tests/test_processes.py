"""Too few processes, or several on a GPU, are errors; a mistake is said once, and last too."""

import os
import subprocess
import sys

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flow_grpo import processes


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Start every test without a launcher's variables."""
    for name in (
        "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION",
        "TORCHELASTIC_ERROR_FILE",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(processes.ASKED, raising=False)


def test_as_many_processes_as_were_asked_for_are_fine(monkeypatch):
    processes.check_processes(1)
    processes.check_processes(8)  # by another launcher, which says nothing
    monkeypatch.setenv(processes.ASKED, "8")
    processes.check_processes(8)


@pytest.mark.parametrize("started", [1, 7, 9])
def test_another_number_than_was_asked_for_is_an_error(started, monkeypatch):
    monkeypatch.setenv(processes.ASKED, "8")
    monkeypatch.setenv("ACCELERATE_CONFIG", "mine.yaml")
    said = f"8 processes were asked for .* and {started} started; .*mine.yaml.* must be for several"
    with pytest.raises(ValueError, match=said):
        processes.check_processes(started)


def test_one_process_of_several_is_an_error_unless_one_was_asked_for(monkeypatch):
    monkeypatch.setattr(processes, "_launched_as_one_of_several", lambda: True)
    with pytest.raises(ValueError, match="accelerate launch was asked for several processes and"):
        processes.check_processes(1)
    processes.check_processes(2)
    monkeypatch.setenv(processes.ASKED, "1")
    processes.check_processes(1)


@pytest.mark.parametrize(
    ("before", "inside", "is_error"),
    [
        ({}, {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "far"}, {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "::1"}, True),
        ({"MASTER_ADDR": "far"}, {"ACCELERATE_MIXED_PRECISION": "no"}, False),
        ({}, {"ACCELERATE_MIXED_PRECISION": "no"}, False),
        ({}, {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "::1", "LOCAL_RANK": "0"}, False),
        ({}, {"MASTER_ADDR": "127.0.0.1"}, False),  # by no launcher of accelerate's
    ],
)
def test_a_meeting_point_without_a_rank_is_the_launchers_who_started_too_few(
    before, inside, is_error
):
    """`before` is set where the launcher starts, `inside` is what it adds for its process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
    check = "from flow_grpo import processes as p; print(p._launched_as_one_of_several())"
    start = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], "
    done = subprocess.run(
        [sys.executable, "-c", start + f"env={{**os.environ, **{inside}}}, check=True)", check],
        env={**kept, **before}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(is_error)


def test_processes_that_would_share_a_gpu_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    processes.check_processes(4)  # on two machines
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="3 processes on this machine would share its 2 GPUs"):
        processes.check_processes(6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # they meet on the CPU
    processes.check_processes(6)


@pytest.mark.parametrize(
    ("available", "deepspeed", "expected"),
    [(False, "", True), (True, "", False), (False, "true", False), (False, "false", True)],
)
def test_processes_meet_on_the_cpu_without_a_gpu(available, deepspeed, expected, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", deepspeed)
    assert processes.without_gpu() is expected


def test_a_mistake_is_what_torchruns_last_line_says(monkeypatch, capfd, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    processes.say_mistake("error: 7 is too much")
    assert capfd.readouterr().err == "error: 7 is too much\n"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message == "error: 7 is too much"
    assert failure.timestamp > 1.7e9


def test_the_first_process_of_a_machine_speaks_first(monkeypatch, capfd):
    said = []
    monkeypatch.setattr(processes.time, "sleep", lambda s: said.append((s, capfd.readouterr().err)))
    for rank in ("0", "3"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        processes.say_mistake(f"error of {rank}")
    assert said == [(processes.FIRST_SPEAKS_S, "error of 0\n")]
    assert capfd.readouterr().err == "error of 3\n"
