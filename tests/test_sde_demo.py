"""scripts/demo/sde_demo.py shows every SDE and finds the unpatched pipeline at noise 0."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "demo" / "sde_demo.py"


def _run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


FAMILIES = {
    "sd3": ("tiny_sd3_dir",),
    "flux": ("tiny_flux_dir", "--max_sequence_length", "32"),
    "flux_kontext": ("tiny_flux_kontext_dir", "--max_sequence_length", "32", "--image"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_grid_shows_every_sde_and_noise_0_is_the_unpatched_pipeline(
    family, request, edit_set, tmp_path
):
    out = tmp_path / "new" / "grid.png"
    fixture, *more = FAMILIES[family]
    if "--image" in more:
        more.append(str(edit_set / "train" / "1.png"))
    done = _run(
        *("--model", family, "--pretrained", request.getfixturevalue(fixture), *more),
        *("--resolution", "32", "--num_steps", "3"),
        *("--guidance_scale", "3", "--noise_levels", "0,0.7", "--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"noise 0, (\w+): .*? ([\d.e+-]+) \(latents\), ([\d.e+-]+)", done.stdout)
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


@pytest.mark.parametrize("model", ["qwenimage", "wan2_1"])
def test_every_family_has_the_grid(model, request, tmp_path):
    folder = request.getfixturevalue({"qwenimage": "tiny_qwenimage_dir"}.get(model, "tiny_wan_dir"))
    out = tmp_path / "grid.png"
    done = _run(
        *("--model", model, "--pretrained", folder, "--resolution", "32", "--num_steps", "3"),
        *("--guidance_scale", "3", "--noise_levels", "0,0.7", "--out", str(out)),
        *("--max_sequence_length", "32", "--num_frames", "5"),
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"noise 0, \w+: .*? ([\d.e+-]+) \(latents\), ([\d.e+-]+)", done.stdout)
    assert len(found) == 3
    assert all(float(latents) < 1e-5 and float(pixels) < 1e-5 for latents, pixels in found)
    assert Image.open(out).size == (84 + 2 * 128, 20 + 3 * 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "sd4"),
            "unknown model 'sd4'; there are: flux, flux_kontext, qwenimage, ",
        ),
        (("--image", "a.png"), "--image ('a.png'): model sd3 takes no reference image"),
        (("--noise_levels", "0,-1"), "--noise_levels (0,-1) must be numbers from 0 on"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    done = _run(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(message)
    assert done.stdout == ""
