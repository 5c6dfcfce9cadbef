"""scripts/demo/sde_demo.py shows every SDE and finds the unpatched pipeline at noise 0."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import families
import numpy as np
import pytest
from families import FAMILIES
from PIL import Image

from flow_grpo import registry

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "demo" / "sde_demo.py"


@pytest.fixture
def demo(monkeypatch, capsys):
    """Return a function that runs the script in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        capsys.readouterr()
        code = runpy.run_path(str(SCRIPT))["main"]()
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", FAMILIES)
def test_the_grid_shows_every_sde_and_noise_0_is_the_unpatched_pipeline(
    name, demo, tiny_dir, edit_set, tmp_path
):
    out, family = tmp_path / "new" / "grid.png", FAMILIES[name]
    flags = {
        "model": name, "pretrained": tiny_dir(name), "resolution": 32, "num_steps": 3,
        "guidance_scale": 3, "noise_levels": "0,0.7", "out": out,
        "num_frames": family.num_frames, "max_sequence_length": family.length,
        "reference_resolution": family.reference_resolution,
        "image": edit_set / "train" / "1.png" if family.references else "",
    }  # fmt: skip
    code, stdout, stderr = demo(*(f"--{flag}={value}" for flag, value in flags.items()))
    assert code == 0, stderr
    found = re.findall(r"noise 0, (\w+): .*? ([\d.e+-]+) \(latents\), ([\d.e+-]+)", stdout)
    assert [name for name, *_ in found] == ["flow_sde", "cps", "dance_sde"]
    assert all(float(latents) < 1e-5 and float(pixels) < 1e-5 for _, latents, pixels in found)
    # 84 and 20 pixels of labels, then cells of 128: two columns, three rows
    pixels = np.asarray(Image.open(out)).astype(int)
    assert pixels.shape == (20 + 3 * 128, 84 + 2 * 128, 3)
    cells = [
        [pixels[20 + 128 * r : 148 + 128 * r, 84 + 128 * c : 212 + 128 * c] for c in range(2)]
        for r in range(3)
    ]
    assert np.array_equal(cells[0][0], cells[1][0])
    assert np.array_equal(cells[0][0], cells[2][0])
    for row in cells:
        assert np.abs(row[1] - row[0]).max() > 10


def test_the_script_runs_by_itself_on_the_shipped_pipeline(tmp_path):
    command = [sys.executable, str(SCRIPT), "--num_steps=2", f"--out={tmp_path / 'grid.png'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "noise 0, cps: largest difference" in done.stdout
    assert (tmp_path / "grid.png").is_file()


def test_a_pipeline_alone_says_its_family_and_settings(demo, tiny_dir, tmp_path, monkeypatch):
    from config import models

    def small(config):
        wan2_1(config)
        config.resolution, config.width, config.num_frames = 32, 48, 5
        config.sample.num_steps, config.sample.max_sequence_length = 3, 16

    wan2_1 = models.wan2_1
    monkeypatch.setattr(models, "wan2_1", small)
    out = tmp_path / "grid.png"
    code, stdout, stderr = demo(
        "--pretrained", tiny_dir("wan2_1"), "--noise_levels=0", "--out", out
    )
    assert code == 0, stderr
    assert "noise 0, cps: largest difference" in stdout
    assert Image.open(out).size == (84 + 4 * 48, 20 + 3 * 4 * 32)  # cells of 128 at least
    square = (
        "--pretrained",
        tiny_dir("wan2_1"),
        "--noise_levels=0",
        "--resolution=32",
        "--out",
        out,
    )
    assert demo(*square)[0] == 0
    assert Image.open(out).size == (84 + 128, 20 + 3 * 128), "the family's width is not asked for"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "sd4"),
            f"unknown model 'sd4'; there are: {', '.join(registry.names(families.MODELS))}",
        ),
        (("--image", "a.png"), "--image ('a.png'): model sd3 takes no reference image"),
        (("--noise_levels", "0,-1"), "--noise_levels (0,-1) must be numbers from 0 on"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, demo):
    code, stdout, stderr = demo(*arguments)
    assert code == 2
    assert stderr.strip().splitlines()[-1].startswith(message)
    assert stdout == ""
