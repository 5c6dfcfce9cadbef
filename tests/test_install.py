"""Run scripts/install.sh against a stand-in interpreter that writes down what it is asked."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Answers like a python with a working pip; `-m venv` copies itself into the new environment.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$*" in
    "--version") echo "Python 3.11.7" ;;
    "-c "*) exit "$TOO_OLD" ;;
    "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"$FAIL_ON"*) [[ -z "$FAIL_ON" ]] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the files that an installation depends on."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup.py", "pyproject.toml", "constraints.txt", "scripts/install.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def _install(checkout: Path, extra: str = "", *, too_old: int = 0, fail_on: str = ""):
    """Source install.sh, call install_package; return the process and the interpreter's calls."""
    log, python = checkout / "log", checkout / "stand-in"
    log.write_text("")
    python.write_text(STAND_IN)
    python.chmod(0o755)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source scripts/install.sh; install_package {extra}"],
        cwd=checkout,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHON": str(python),
            "LOG": str(log),
            "TOO_OLD": str(too_old),
            "FAIL_ON": fail_on,
        },
        capture_output=True,
        text=True,
    )
    installs = [line for line in log.read_text().splitlines() if "pip install" in line]
    return result, installs


def test_torch_is_installed_first_and_everything_at_its_pin(checkout):
    result, installs = _install(checkout, "test")
    assert result.returncode == 0, result.stderr
    assert installs == [
        "-m pip install -c constraints.txt torch",
        "-m pip install -c constraints.txt -e .[test]",
    ]


def test_a_second_run_installs_nothing(checkout):
    _install(checkout)
    result, installs = _install(checkout)
    assert (result.returncode, installs, result.stdout) == (0, [], "")


def test_the_test_installation_serves_the_quickstart_but_not_the_reverse(checkout):
    _install(checkout, "test")
    assert _install(checkout)[1] == []
    (checkout / ".venv" / "installed-test").unlink()
    _install(checkout)
    assert len(_install(checkout, "test")[1]) == 2


@pytest.mark.parametrize("name", ["setup.py", "constraints.txt", "pyproject.toml"])
def test_a_changed_requirement_installs_again(checkout, name):
    _install(checkout)
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    assert len(_install(checkout)[1]) == 2


def test_a_moved_checkout_installs_again(checkout):
    _install(checkout)
    moved = checkout.rename(checkout.with_name("moved"))
    assert len(_install(moved)[1]) == 2


@pytest.mark.parametrize("step", ["constraints.txt torch", "constraints.txt -e ."])
def test_a_failed_installation_fails_and_is_tried_again(checkout, step):
    failed, _ = _install(checkout, fail_on=step)
    assert failed.returncode != 0
    result, installs = _install(checkout)
    assert (result.returncode, len(installs)) == (0, 2)


def test_an_environment_without_pip_is_made_anew(checkout):
    _install(checkout)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    result, installs = _install(checkout)
    assert (result.returncode, len(installs)) == (0, 2)


def test_a_python_that_is_too_old_is_refused_by_name(checkout):
    result, installs = _install(checkout, too_old=1)
    assert result.returncode != 0
    assert installs == []
    assert "needs Python 3.10 or newer" in result.stderr
    assert "Python 3.11.7" in result.stderr  # what the stand-in says it is


def test_no_script_names_a_package_index():
    scripts = [*(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci" / "run", ROOT / "constraints.txt"]
    for path in scripts:
        text = path.read_text()
        assert not any(word in text for word in ("index-url", "find-links", "pypi.")), path.name
