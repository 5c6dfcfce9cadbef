"""The report: whole at any moment of a run, self-contained, safe from what a prompt says."""

import base64
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from flow_grpo.curves import COLOURS, Series, draw_areas, draw_curves
from flow_grpo.report import render_report, write_report
from flow_grpo.samples import read_samples, save_samples

SCRIPT = Path(__file__).parents[1] / "scripts" / "report.py"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a browser finds: tags, their addresses, visible text; an unclosed tag fails."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.images, self.text, self.open = [], [], [], [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        if tag == "img":
            self.images.append(values)
        names = ("src", "href", "xlink:href", "action", "data", "srcset")
        self.addresses += [values[name] for name in names if name in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def _config(run, **more):
    run.mkdir(parents=True, exist_ok=True)
    config = {"seed": 42, "num_epochs": 4, "sample": {"num_steps": 8, "range": [0, 7]}}
    config |= {"algorithm": "grpo_guard", **more}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def _log(run, *lines):
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _evaluation(run, epoch, value, size=16, prompts=('"A" on a sign', '"B" on a sign')):
    _log(run, {"epoch": epoch, "update": 2 * epoch, "eval/ocr": value, "eval/ocr_stderr": 0.04})
    images = torch.rand(len(prompts), 3, size, size, generator=torch.Generator().manual_seed(epoch))
    scores = [value] * len(prompts)
    save_samples(run, epoch, images, prompts, {"ocr": scores, "total": scores})


def _training(epoch, **more):
    return {
        "epoch": epoch,
        "update": 2 * epoch + 2,
        "reward/ocr": 0.5 + epoch / 10,
        "reward/total": 0.5 + epoch / 10,
        "reward/std": 0.2,
        "group/zero_std_fraction": 0.1,
        "train/ratio_mean": 1.00001,
        "train/ratio_dev_first": 0.0,
        "train/clip_fraction": 0.1,
        "train/kl": 0.001,
        "train/grad_norm": 0.3,
        "train/learning_rate": 3e-4,
        "time/rollout_s": 5.0,
        "time/reward_s": 1.0,
        "time/update_s": 4.0,
        "perf/images_per_s": 11.5,
        **more,
    }


def _finished(run, epochs=4):
    _config(run)
    for epoch in range(epochs):
        _evaluation(run, epoch, 0.5 + epoch / 20)
        _log(run, _training(epoch))
    _evaluation(run, epochs, 0.75)
    summary = {
        "eval_before": {"ocr": 0.5, "ocr_stderr": 0.04, "total": 0.5},
        "eval_after": {"ocr": 0.75, "ocr_stderr": 0.03, "total": 0.75},
        "epochs": epochs,
        "images": 1536,
        "seconds": 90.0,
        "images_per_s": 17.07,
        "peak_memory_gib": 1.25,
        "ratio_dev_first_max": 0.0,
        "versions": {"torch": "2.13.0"},
        "commit": "0a1b2c3d",
    }
    (run / "summary.json").write_text(json.dumps(summary))


def test_a_finished_run_says_what_it_reached(tmp_path):
    run = tmp_path / "my run"
    _finished(run)
    path = write_report(run)
    assert path == run / "report.html"
    page = Page(path.read_text())
    assert "ocr 0.500 \u00b1 0.040 0.750 \u00b1 0.030 +0.250" in page.words
    for part in (
        "finished grpo_guard, written",
        "1,536",
        "1.5",
        "17.1",
        "1.25 GiB",
        "0a1b2c3d",
        "2.13.0",
        "num_steps",
    ):
        assert part in page.words
    titles = ("Reward: ocr", "Ratio, mean - 1", "First |ratio - 1|", "Clip fraction", "KL to the")
    titles += ("Gradient norm", "Learning rate", "Groups without a signal", "Seconds by phase")
    for title in titles:
        assert title in page.words
    assert page.tags.count("svg") == len(titles)
    assert len(page.images) == 2 * 5  # two prompts, five evaluations
    assert not [name for name in run.iterdir() if name.name.startswith(".")]


def test_the_page_needs_no_network_and_runs_no_script(tmp_path):
    _finished(tmp_path / "run")
    html = render_report(tmp_path / "run")
    page = Page(html)
    assert page.addresses
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|(?:src|href)=.?//|url\((?!#)|@import", html)


def test_a_prompt_cannot_write_into_the_page(tmp_path):
    run = tmp_path / "run"
    _config(run, name="</td><script>alert(1)</script>")
    prompt = """<script>alert("x")</script>' onerror='alert(1)" onload="alert(1)"""
    _evaluation(run, 0, 0.5, prompts=(prompt, "plain"))
    _log(run, {"epoch": 0, "eval/<img src=x>": 0.5, "time/<b>_s": 1.0})
    page = Page(render_report(run))
    assert "script" not in page.tags
    assert not {"onerror", "onload"} & {name for image in page.images for name in image}
    assert page.images[0]["alt"] == f"{prompt}, epoch 0"
    assert prompt in page.words
    assert len(page.images) == 2


def test_images_arrive_unchanged_and_small_ones_keep_their_pixels(tmp_path):
    run = tmp_path / "run"
    _config(run)
    _evaluation(run, 0, 0.5, size=64)
    _evaluation(run, 1, 0.5, size=512, prompts=("one",))
    small, large, _ = Page(render_report(run)).images
    assert small["class"] == "crisp"
    embedded = base64.b64decode(small["src"].removeprefix("data:image/png;base64,"))
    assert embedded == (run / "samples" / "epoch-000000" / "000.png").read_bytes()
    assert "class" not in large
    data = base64.b64decode(large["src"].removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(data)).size == (256, 256)


def test_a_run_before_its_first_epoch_has_a_report(tmp_path):
    run = tmp_path / "run"
    _config(run)
    words = Page(render_report(run)).words
    for part in ("in progress", "No evaluation yet", "Nothing was logged", "No samples", "0 of 4"):
        assert part in words


def test_one_evaluation_without_training_shows_no_change(tmp_path):
    run = tmp_path / "run"
    _config(run)
    _evaluation(run, 0, 0.5)
    page = Page(render_report(run))
    assert "ocr 0.500 \u00b1 0.040" in page.words
    assert "change" not in page.words
    assert page.tags.count("svg") == 1


def test_training_without_evaluation_shows_its_curves(tmp_path):
    run = tmp_path / "run"
    _config(run)
    _log(run, _training(0))
    page = Page(render_report(run))
    assert "No evaluation yet" in page.words
    assert page.tags.count("svg") == 9


def test_a_run_in_the_middle_compares_with_the_latest_evaluation(tmp_path):
    run = tmp_path / "run"
    _finished(run)
    (run / "summary.json").unlink()
    words = Page(render_report(run)).words
    assert "in progress" in words
    assert "latest (epoch 4)" in words
    assert "+0.250" in words


@pytest.mark.parametrize("text", ["{", "[1]", "null", ""])
def test_a_half_written_summary_counts_as_none(tmp_path, text):
    run = tmp_path / "run"
    _finished(run)
    (run / "summary.json").write_text(text)
    assert "in progress" in Page(render_report(run)).words


def test_null_and_broken_lines_leave_gaps_only(tmp_path):
    run = tmp_path / "run"
    _config(run)
    nothing = {key: None for key in _training(1) if key not in ("epoch", "update")}
    _log(run, _training(0), {"epoch": 1, "update": 4, **nothing}, _training(2))
    _log(run, {"epoch": 2, "eval/ocr": None, "eval/ocr_stderr": None}, {"epoch": None}, [1])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "train/kl": NaN, "reward/ocr": Infinity}\n{"epoch": 4, "rew')
    page = Page(render_report(run))
    assert page.tags.count("svg") == 9
    assert "2 line(s)" in page.words  # the list and the half line


def test_a_metric_that_is_never_a_number_is_left_out(tmp_path):
    run = tmp_path / "run"
    _config(run)
    _log(run, _training(0, **{"train/kl": None}))
    assert "KL to the" not in Page(render_report(run)).words


def test_missing_samples_are_shown_as_missing(tmp_path):
    run = tmp_path / "run"
    _config(run)
    for epoch in range(3):
        _evaluation(run, epoch, 0.5)
    (run / "samples" / "epoch-000001" / "000.png").unlink()
    (run / "samples" / "epoch-000001" / "001.png").write_bytes(b"\x89PNG broken")
    (run / "samples" / "epoch-000002" / "scores.json").write_text("[{")
    (run / "samples" / "epoch-000009").mkdir()
    page = Page(render_report(run))
    assert len(page.images) == 2
    assert page.text.count("missing") == 2


def test_a_sample_without_a_score_says_so(tmp_path):
    run = tmp_path / "run"
    _config(run)
    scores = {"ocr": [None, math.nan], "total": [0.5, 1.0]}
    save_samples(run, 0, torch.zeros(2, 3, 4, 4), ["a", "b"], scores)
    assert json.loads((run / "samples/epoch-000000/scores.json").read_text()) == [
        {"file": "000.png", "prompt": "a", "scores": {"ocr": None, "total": 0.5}},
        {"file": "001.png", "prompt": "b", "scores": {"ocr": None, "total": 1.0}},
    ]
    assert Page(render_report(run)).words.count("ocr no score") == 2


def test_many_evaluations_are_thinned_to_the_first_the_last_and_some_between(tmp_path):
    run = tmp_path / "run"
    _config(run)
    for epoch in range(0, 110, 10):
        _evaluation(run, epoch, 0.5, prompts=[f"prompt {i}" for i in range(20)], size=4)
    page = Page(render_report(run))
    heads = [text for text in page.text if re.fullmatch(r"epoch \d+|before training", text)]
    assert heads == ["before training", "epoch 20", "epoch 40", "epoch 60", "epoch 80", "epoch 100"]
    assert len(page.images) == 12 * 6
    assert "the first 12 of 20 held-out prompts" in page.words


def test_settings_that_are_no_plain_yaml_are_shown_as_text(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("window: !!python/tuple [0, 7]\n")
    assert "!!python/tuple [0, 7]" in Page(render_report(run)).words


def test_clips_are_embedded_small_at_their_speed(tmp_path):
    """As saved, 72 clips of 33 frames of 240 x 416 pixels would make a page of up to 130 MB."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    shades = torch.linspace(0, 1, 9).view(1, 9, 1, 1, 1)
    save_samples(tmp_path, 0, shades.expand(1, 9, 3, 48, 512), ["a"], {"ocr": [1.0]})
    (source,) = re.findall(r"data:image/webp;base64,([^\"]*)", render_report(tmp_path))
    found = []
    with Image.open(io.BytesIO(base64.b64decode(source))) as clip:
        assert (clip.n_frames, clip.size) == (5, (256, 24))
        for place in range(5):
            clip.seek(place)
            clip.load()
            assert clip.info["duration"] == 2 * 62
            found.append(np.asarray(clip.convert("RGB")).mean() / 255)
    assert found == pytest.approx(shades.flatten()[::2].tolist(), abs=0.03)
    file = tmp_path / "samples" / "epoch-000000" / "000.webp"
    file.write_bytes(file.read_bytes()[:-40])
    assert "data:image/webp" not in render_report(tmp_path)


def test_saved_samples_are_the_images_in_eight_bits(tmp_path):
    # 0.5 * 255 = 127.5 rounds to the even 128; what is out of range or no number is clipped.
    values = torch.tensor([0.0, 1.0, 0.5, 0.1, -3.0, 7.0, math.nan, 1.0])
    image = values.reshape(1, 1, 2, 4).expand(1, 3, 2, 4)
    folder = save_samples(tmp_path, 3, image, ["a"], {"ocr": [1.0]})
    assert folder == tmp_path / "samples" / "epoch-000003"
    pixels = np.asarray(Image.open(folder / "000.png"))
    assert pixels.shape == (2, 4, 3)
    assert pixels[..., 1].ravel().tolist() == [0, 255, 128, 26, 0, 255, 0, 255]


def test_samples_of_an_epoch_replace_the_ones_before(tmp_path):
    save_samples(tmp_path, 3, torch.zeros(3, 3, 4, 4), list("abc"), {"ocr": [0, 0, 0]})
    save_samples(tmp_path, 3, torch.zeros(1, 3, 4, 4), ["d"], {"ocr": [1.0]})
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["epoch-000003"]
    assert [entry["prompt"] for entry in read_samples(tmp_path)[3]] == ["d"]
    assert len(list((tmp_path / "samples" / "epoch-000003").glob("*.png"))) == 1


def test_samples_that_do_not_match_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"scores\['ocr'\] has 1 entries for 2 images"):
        save_samples(tmp_path, 0, torch.zeros(2, 3, 4, 4), ["a", "b"], {"ocr": [1.0]})
    assert not (tmp_path / "samples").exists()


def test_a_curve_passes_through_its_values():
    # With the y axis from 0 to 3 in equal steps, 1 lies a third up: equal x gaps, y gaps 1 : 2.
    svg = draw_curves(Series([0, 1, 2], [0.0, 1.0, 3.0]), epochs=(0, 2))
    line = re.findall(r'<path d="(M[^"]*)"[^>]*var\(--train\)', svg)
    points = [re.findall(r"[-\d.]+", path) for path in line]
    (path,) = [[float(v) for v in point] for point in points if len(point) == 6]
    x, y = path[::2], path[1::2]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=1e-3)
    assert (y[1] - y[2]) == pytest.approx(2 * (y[0] - y[1]), abs=1e-3)


def test_curves_use_the_colours_of_the_page_only():
    curve = draw_curves(Series([0], [1.0]), Series([0], [0.5]), [0.1], epochs=(0, 0))
    areas, names = draw_areas({"a": Series([0, 1], [1.0, math.nan]), "b": Series([], [])})
    assert names == ["a"]
    for svg in (curve, areas):
        assert not any(colour in svg for colour in COLOURS.values())
        assert set(re.findall(r"#[0-9a-f]{6}\b(?!\")", svg)) <= {"#000000"}


def test_curves_without_values_are_not_drawn():
    empty = Series([0, 1], [math.nan, math.nan])
    assert draw_curves(empty, empty, epochs=(0, 1)) == ""
    assert draw_areas({"a": empty}) == ("", [])


def test_ids_of_the_figures_on_a_page_do_not_collide(tmp_path):
    _finished(tmp_path / "run")
    ids = re.findall(r'\bid="([^"]+)"', render_report(tmp_path / "run"))
    assert len(ids) == len(set(ids))


def test_the_script_writes_the_report_and_refuses_what_is_no_run(tmp_path):
    run = tmp_path / "run"
    _finished(run)
    done = subprocess.run([sys.executable, SCRIPT, run], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(run / "report.html"))
    for folder in (tmp_path, tmp_path / "absent"):
        done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert f"{folder} is no run folder" in line


def test_reading_a_run_needs_neither_torch_nor_accelerate():
    heavy = "{'torch', 'accelerate', 'matplotlib', 'jinja2'}"
    code = f"import sys, flow_grpo.report; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
