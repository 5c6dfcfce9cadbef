"""The launch scripts hand on what they are given, and refuse what cannot work."""

import importlib
import re
import stat
from pathlib import Path

import pytest
from launch_scripts import MULTI, ROOT, SCRIPTS, SINGLE, run

from flow_grpo.batching import plan_batches

FOLDERS = ("single_node", "multi_node")
LAUNCH = ["launch", "--quiet", "--mixed_precision", "no", "--dynamo_backend", "no"]
# Writes its arguments and its folder down, instead of starting processes.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$PWD" "$@" >"$LOG"
"""


def rank(script: str) -> list[str]:
    """Return the arguments that a script needs."""
    return [] if script in SINGLE else ["0"]


@pytest.fixture
def launched(tmp_path):
    """Return a function that runs a script and returns (folder, arguments) of its launcher."""
    launcher = tmp_path / "bin" / "accelerate"
    launcher.parent.mkdir()
    launcher.write_text(STAND_IN)
    launcher.chmod(0o755)

    def call(script: str, *arguments: str, **settings: str) -> tuple[str, list[str]]:
        log = tmp_path / "log"
        done = run(script, *arguments, path=launcher.parent, cwd=tmp_path, LOG=str(log), **settings)
        assert done.returncode == 0, done.stderr
        folder, *given = log.read_text().splitlines()
        return folder, given

    return call


# Else the file that `accelerate config` wrote for the user would choose the back-end.
ONE_PROCESS = ["--config_file", "scripts/accelerate_configs/one_process.yaml"]


def test_the_table_names_every_script():
    files = (f for folder in FOLDERS for f in (ROOT / "scripts" / folder).rglob("*"))
    assert {f.relative_to(ROOT / "scripts").as_posix() for f in files if f.is_file()} == {*SCRIPTS}


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_table_of_scripts_in_a_readme_is_complete(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+_node/[\w/]+\.sh)` \| `([^`]+)` \| (\d+) x (\d+) \|$", text, re.M)
    assert sorted(rows) == sorted(
        (script, f"config/{p.preset}", str(p.machines), str(p.gpus))
        for script, p in SCRIPTS.items()
    )


@pytest.mark.parametrize("script", SINGLE)
def test_a_script_launches_its_preset_on_this_machine(script, launched):
    published = SCRIPTS[script]
    folder, given = launched(script)
    assert Path(folder) == ROOT
    assert given == [
        *LAUNCH, "--num_processes", str(published.gpus),
        *(["--multi_gpu"] if published.gpus > 1 else ONE_PROCESS),
        "--num_machines", "1", "--main_process_port", "0", *published.start,
    ]  # fmt: skip


@pytest.mark.parametrize("script", MULTI)
def test_a_script_launches_its_preset_on_one_of_several_machines(script, launched):
    published = SCRIPTS[script]
    last = str(published.machines - 1)
    folder, given = launched(script, last, "--dry_run", MASTER_ADDR="first")
    assert Path(folder) == ROOT
    assert given == [
        *LAUNCH, "--num_processes", str(published.machines * published.gpus), "--multi_gpu",
        "--num_machines", str(published.machines), "--machine_rank", last,
        "--main_process_ip", "first", "--main_process_port", "29500",
        "--deepspeed_multinode_launcher", "standard", *published.start, "--dry_run",
    ]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts_what_exists_with_numbers_that_divide(script):
    published = SCRIPTS[script]
    train, _, preset = published.start
    assert (ROOT / train).is_file()
    file, _, name = preset.partition(":")
    config = importlib.import_module(f"config.{Path(file).stem}").get_config(name)
    plan_batches(
        groups_per_epoch=config.sample.groups_per_epoch,
        group_size=config.sample.group_size,
        updates_per_epoch=config.train.updates_per_epoch,
        batch_size=config.sample.batch_size,
        world_size=published.machines * published.gpus,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_told_what_to_launch_and_hands_on_every_argument(script, launched):
    settings = {"CONFIG": "mine.py:a b", "SCRIPT": "other.py", "NUM_PROCESSES": "6"}
    settings |= {"MASTER_PORT": "29123", "NUM_MACHINES": "3", "MASTER_ADDR": "::1"}
    _, given = launched(
        script, *rank(script), "--config.run_name=two words", "--dry_run", **settings
    )
    machine = ["--num_machines", "1"]
    where = ["--main_process_port", "29123"]
    if script in MULTI:
        machine = ["--num_machines", "3", "--machine_rank", "0", "--main_process_ip", "::1"]
        where += ["--deepspeed_multinode_launcher", "standard"]
    assert given == [
        *LAUNCH, "--num_processes", "6", "--multi_gpu", *machine, *where,
        "other.py", "--config", "mine.py:a b", "--config.run_name=two words", "--dry_run",
    ]  # fmt: skip


def test_processes_follow_the_number_of_machines(launched):
    _, given = launched("multi_node/flux_kontext.sh", "1", NUM_MACHINES="3", MASTER_ADDR="a")
    assert given[given.index("--num_processes") + 1] == "21"
    _, given = launched("multi_node/sd3.sh", "0", NUM_MACHINES="1")
    assert given[given.index("--num_processes") + 1] == "8"
    assert given[given.index("--main_process_ip") + 1] == "127.0.0.1"


@pytest.mark.parametrize("script", ["single_node/grpo.sh", "multi_node/sd3.sh"])
def test_a_configuration_of_accelerate_says_how_processes_work_together(script, launched, tmp_path):
    file = tmp_path / "zero.yaml"
    file.touch()
    _, given = launched(
        script, *rank(script), ACCELERATE_CONFIG=str(file), NUM_PROCESSES="8", MASTER_ADDR="a"
    )
    assert given[given.index("--config_file") + 1] == str(file)
    assert "--multi_gpu" not in given  # with it accelerate would not read the kind in the file
    assert given[given.index("--num_processes") + 1] == "8"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_and_fails_when_its_launcher_does(script, tmp_path):
    assert (ROOT / "scripts" / script).stat().st_mode & stat.S_IXUSR
    launcher = tmp_path / "accelerate"
    launcher.write_text("#!/usr/bin/env bash\nexit 3\n")
    launcher.chmod(0o755)
    done = run(script, *rank(script), path=tmp_path, cwd=tmp_path, MASTER_ADDR="a")
    assert done.returncode == 3


RANK = "error: the first argument must be this machine's rank, from 0 to 3, and is "


@pytest.mark.parametrize(
    ("arguments", "settings", "line"),
    [
        ((), {}, RANK + "missing: bash "),
        (("",), {}, RANK + "missing: bash "),
        (("--dry_run",), {}, RANK + "--dry_run: bash "),
        (("one",), {}, RANK + "one: bash "),
        (("-1",), {}, RANK + "-1: bash "),
        (("4",), {}, RANK + "4: bash "),
        (("08",), {}, RANK + "08: bash "),
        (("99999999999999999999",), {}, RANK + "99999999999999999999: bash "),
        (("2",), {"NUM_MACHINES": "2"}, "rank, from 0 to 1, and is 2: bash "),
        (("0",), {}, "error: MASTER_ADDR is not set: give the address of machine 0 on every"),
        (("0",), {"MASTER_ADDR": ""}, "error: MASTER_ADDR is not set"),
        (("0",), {"NUM_PROCESSES": "30"}, "error: NUM_PROCESSES (30) must be a multiple of NUM_MA"),
        (("0",), {"NUM_PROCESSES": "0"}, "error: NUM_PROCESSES (0) must be a whole number from 1"),
        (("0",), {"NUM_PROCESSES": "2x"}, "error: NUM_PROCESSES (2x) must be a whole number"),
        (("0",), {"NUM_MACHINES": "a[0]"}, "error: NUM_MACHINES (a[0]) must be a whole number"),
        (("0",), {"MASTER_PORT": "http"}, "error: MASTER_PORT (http) must be a whole number"),
        (
            ("0",), {"MASTER_ADDR": "a", "ACCELERATE_CONFIG": "none.yaml"},
            "error: ACCELERATE_CONFIG (none.yaml) is no file; there are: scripts/accelerate_conf",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_on_several_machines_is_one_line(arguments, settings, line, tmp_path):
    script = "multi_node/sd3.sh"
    done = run(script, *arguments, path=tmp_path, cwd=tmp_path, **settings)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("script", MULTI)
def test_every_script_for_several_machines_asks_for_its_rank(script, tmp_path):
    done = run(script, path=tmp_path, cwd=tmp_path, MASTER_ADDR="a")
    last = SCRIPTS[script].machines - 1
    assert done.returncode == 2
    assert f"this machine's rank, from 0 to {last}, and is missing" in done.stderr


@pytest.mark.parametrize("name", ["NUM_PROCESSES", "MASTER_PORT"])
def test_a_wrong_number_is_one_line_on_one_machine_too(name, tmp_path):
    done = run("single_node/grpo.sh", path=tmp_path, cwd=tmp_path, **{name: "two"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {name} (two) must be a whole number from 1 on\n"
