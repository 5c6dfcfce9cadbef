"""docs/new_model.md: its commands do what it shows."""

import contextlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flow_grpo.models.zimage import ZImage

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "new_model.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```", GUIDE, flags=re.M | re.S)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


@pytest.fixture
def step(tmp_path, monkeypatch):
    """Return the function (number) -> (words of the first command, its lines), in a new folder."""
    monkeypatch.chdir(ROOT)

    def read(number: int) -> tuple[list[str], list[str]]:
        command, shown = (text.replace("runs/", f"{tmp_path}/") for text in STEPS[number - 1])
        words = shlex.split(command.replace("\\\n", " ").splitlines()[0])
        assert words.pop(0) == "python"
        return words, shown.splitlines()

    return read


def _run(words: list[str], capfd, monkeypatch) -> list[str]:
    """Run a script in this process; return what it printed."""
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(str(Path(words[0]).parent))
    with contextlib.suppress(SystemExit):
        runpy.run_path(words[0], run_name="__main__")
    return capfd.readouterr().out.splitlines()


def _masked(lines: list[str]) -> list[str]:
    """Return the lines without their numbers, which other machines and times change."""
    return [NUMBER.sub("N", line) for line in lines]


def test_there_are_four_steps():
    assert len(STEPS) == 4
    assert re.findall(r"^## (\d)\.", GUIDE, flags=re.M) == list("1234")


def test_files_have_as_many_lines_as_the_guide_says():
    rows = re.findall(r"^\| `([\w/]+zimage\.py)` \|.*\| (\d+) \|$", GUIDE, flags=re.M)
    rows += [
        (f"flow_grpo/models/{name}.py", re.search(pattern, GUIDE)[1])
        for name, pattern in (("zimage", r"Z-Image took (\d+)"), ("flux2_klein", r"klein (\d+),"))
    ]
    assert len(rows) == 5
    for file, number in rows:
        assert len((ROOT / file).read_text().splitlines()) == int(number), file


def test_the_small_pipeline_is_shown_sampled_and_trained(step, train, capfd, monkeypatch, tmp_path):
    words, shown = step(1)
    assert _run(words, capfd, monkeypatch) == shown

    words, shown = step(2)
    found = _run(words, capfd, monkeypatch)
    assert _masked(found) == _masked(shown)
    assert len(found) == 4
    for line in found[:3]:
        assert all(float(number) < 1e-5 for number in re.findall(r"[\d.]+e-\d+", line))

    words, shown = step(4)
    assert words[0] == "scripts/train_zimage.py"
    logdir = f"--config.logdir={tmp_path}"  # the guide's own is the default
    outcome = train(*words[1:], logdir, adapter=ZImage)
    assert outcome.code == 0, outcome.err
    printed = _masked((outcome.err + outcome.out).splitlines())
    *lines, first, second = shown
    assert [line for line in _masked(lines) if line not in printed] == []
    metrics = (tmp_path / "first_zimage" / "metrics.jsonl").read_text()
    assert re.findall(r'"train/ratio_dev_first": [^,]*', metrics) == [first, second]
    assert first == second == '"train/ratio_dev_first": 0.0'


@pytest.mark.slow
def test_the_contract_has_as_many_tests_as_the_guide_shows(step):
    words, shown = step(3)
    (expected,) = (int(number) for number in re.findall(r"(\d+) passed", "".join(shown)))
    done = subprocess.run(
        [sys.executable, *words, "--collect-only"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = re.findall(r"^tests/models/test_family_contract.py::", done.stdout, flags=re.M)
    assert len(listed) == expected
