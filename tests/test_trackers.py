"""Trackers: what is logged can be read back, and what cannot be logged is said."""

import json
import math
import re

import numpy as np
import pytest
import torch

from flow_grpo import trackers as module
from flow_grpo.metrics import flatten, read_metrics
from flow_grpo.trackers import (
    JsonlTracker,
    close_trackers,
    log,
    log_images,
    metrics_size,
    open_trackers,
    truncate_metrics,
)

CONFIG = {
    "seed": 42,
    "reward_fn": {"ocr": 0.8, "jpeg_compressibility": 0.2},
    "sample": {"window": {"range": (0, 7)}, "sde": "cps"},
    "lora_path": None,
    "use_ema": True,
}
# A 2 x 3 image, red in its first row and black in its second, and a white one.
IMAGES = torch.stack([torch.zeros(3, 2, 3), torch.ones(3, 2, 3)])
IMAGES[0, 0, 0] = 1.0


def _strict(text):
    """Parse JSON as the standard has it, where NaN is no value."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    opened = open_trackers((), tmp_path, "run", CONFIG)
    path = tmp_path / "metrics.jsonl"
    log(opened, {"epoch": 0, "reward/ocr": 0.5}, step=2)
    assert [_strict(line) for line in path.read_text().splitlines()] == [
        {"update": 2, "epoch": 0, "reward/ocr": 0.5}
    ]
    log(opened, {"epoch": 1, "update": 4, "reward/ocr": 0.25}, step=4)
    assert _strict(path.read_text().splitlines()[1]) == {
        "epoch": 1,
        "update": 4,
        "reward/ocr": 0.25,
    }
    close_trackers(opened)


def test_jsonl_stays_json_whatever_is_logged(tmp_path):
    opened = open_trackers((), tmp_path, "run", CONFIG)
    values = {
        "epoch": 0,
        "nan": math.nan,
        "inf": -math.inf,
        "numpy": np.float32(0.5),
        "numpy_nan": np.float32("nan"),
        "torch": torch.tensor(0.25),
        "count": np.int64(7),
        "list": (1.0, math.nan),
        "text": 'a "quoted"\nline',
    }
    log(opened, values, step=0)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert _strict(line) == {
        "update": 0,
        "epoch": 0,
        "nan": None,
        "inf": None,
        "numpy": 0.5,
        "numpy_nan": None,
        "torch": 0.25,
        "count": 7,
        "list": [1.0, None],
        "text": 'a "quoted"\nline',
    }


def test_accelerate_takes_the_jsonl_tracker_as_its_own(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=[JsonlTracker("run", tmp_path)])
    accelerator.init_trackers("run")
    accelerator.log({"reward/ocr": 0.5}, step=3)
    assert accelerator.get_tracker("jsonl", unwrap=True) == tmp_path / "metrics.jsonl"
    assert read_metrics(tmp_path / "metrics.jsonl") == ([{"update": 3, "reward/ocr": 0.5}], 0)


def test_truncation_leaves_what_the_checkpoint_knew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    opened = open_trackers((), tmp_path, "run", CONFIG)
    log(opened, {"epoch": 0}, step=2)
    known = metrics_size(path)
    before = path.read_bytes()
    log(opened, {"epoch": 1}, step=4)
    assert truncate_metrics(path, known) == known == len(before)
    assert path.read_bytes() == before
    log(open_trackers((), tmp_path, "run", CONFIG), {"epoch": 1}, step=4)
    assert [line["epoch"] for line in read_metrics(path)[0]] == [0, 1]


@pytest.mark.parametrize(
    ("content", "num_bytes", "kept"),
    [
        (
            b'{"a": 1}\n{"b"',
            13,
            b'{"a": 1}\n',
        ),  # the last line was half written when the power went
        (b'{"a": 1}\n{"b": 2}\n', 12, b'{"a": 1}\n'),  # the bytes end inside a line
        (b'{"a": 1}\n', 100, b'{"a": 1}\n'),  # lines were lost
        (b'{"a": 1}\n', 0, b""),
        (b'{"a"', 4, b""),
    ],
)
def test_truncation_leaves_whole_lines_only(tmp_path, content, num_bytes, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert truncate_metrics(path, num_bytes) == len(kept)
    assert path.read_bytes() == kept


def test_lost_lines_are_said(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    assert truncate_metrics(path, 0) == 0
    assert not caplog.records
    assert truncate_metrics(path, 9) == 0
    assert "lines were lost" in caplog.text
    assert metrics_size(path) == 0


def test_flattened_settings_are_scalars_under_dotted_names():
    assert flatten(CONFIG) == {
        "seed": 42,
        "reward_fn.ocr": 0.8,
        "reward_fn.jpeg_compressibility": 0.2,
        "sample.window.range": "[0, 7]",
        "sample.sde": "cps",
        "lora_path": "None",
        "use_ema": True,
    }


def test_tensorboard_events_hold_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = open_trackers(("tensorboard",), tmp_path, "run", CONFIG)
    assert [tracker.name for tracker in opened] == ["jsonl", "tensorboard"]
    log(opened, {"epoch": 0, "reward/ocr": 0.5, "train/kl": math.nan}, step=2)
    log(opened, {"epoch": 1, "reward/ocr": np.float32(0.75)}, step=4)
    log_images(opened, {"eval/samples": IMAGES}, step=4)
    close_trackers(opened)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/ocr")] == [(2, 0.5), (4, 0.75)]
    assert "train/kl" not in events.Tags()["scalars"]
    images = [tag for tag in events.Tags()["images"] if tag.startswith("eval/samples")]
    shown = [events.Images(tag)[0] for tag in images]
    assert shown
    assert {(image.step, image.height) for image in shown} == {(4, 2)}
    # The settings lie in a run of their own below it, as accelerate's tracker writes them.
    assert list((tmp_path / "tensorboard").glob("*/hparams.yml"))


def test_a_resumed_tensorboard_shows_each_update_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = open_trackers(("tensorboard",), tmp_path, "run", CONFIG)
    for update in (2, 4, 6):
        log(first, {"reward/ocr": float(update)}, step=update)
    close_trackers(first)
    # An event file's name holds its second: the second one must sort behind the first.
    (old,) = (tmp_path / "tensorboard").glob("events*")
    old.rename(old.with_name(re.sub(r"tfevents\.\d+", "tfevents.1000000000", old.name)))
    second = open_trackers(("tensorboard",), tmp_path, "run", CONFIG, update=4)
    log(second, {"reward/ocr": 60.0}, step=6)
    close_trackers(second)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward/ocr")]
    assert shown == [(2, 2.0), (4, 4.0), (6, 60.0)]


def test_wandb_works_offline_inside_the_run_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    opened = open_trackers(("wandb",), run_dir, "my run", CONFIG)
    run = opened[1].tracker
    assert (run.name, run.project, run.offline) == ("my run", "flow_grpo", True)
    assert run.config["sample"]["window"]["range"] == [0, 7]
    log(opened, {"epoch": 0, "reward/ocr": 0.5}, step=2)
    log_images(opened, {"eval/samples": IMAGES}, step=2, captions={"eval/samples": ["a", "b"]})
    log(opened, {"epoch": 1}, step=4)  # W&B commits a step when the next one begins
    assert run.summary["reward/ocr"] == 0.5
    assert run.summary["eval/samples"]["captions"] == ["a", "b"]
    identity = run.id
    close_trackers(opened)
    assert wandb.run is None
    assert len(list((run_dir / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert len(list((run_dir / "wandb").rglob("*.png"))) == 2
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "wandb").exists()
    again = open_trackers(("wandb",), run_dir, "my run", CONFIG, update=2)
    assert again[1].tracker.id == identity
    close_trackers(again)


def test_wandb_can_be_disabled(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    opened = open_trackers(("wandb", "jsonl", "none"), tmp_path, "run", CONFIG)
    log(opened, {"epoch": 0}, step=0)
    close_trackers(opened)
    assert [tracker.name for tracker in opened] == ["jsonl", "wandb"]
    assert metrics_size(tmp_path / "metrics.jsonl") > 0


def test_wandb_without_a_key_is_one_clear_error(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**kwargs):
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"api_key not configured.*WANDB_MODE=offline"):
        open_trackers(("wandb",), tmp_path, "run", CONFIG)


def test_an_unknown_tracker_is_an_error_that_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"'tensorbord'.*wandb.*nearest is 'tensorboard'"):
        open_trackers(("tensorbord",), tmp_path, "run", CONFIG)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "swanlab", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_error_with_the_pip_line(tmp_path, monkeypatch, name):
    find_spec = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util,
        "find_spec",
        lambda package, *rest: None if package == name else find_spec(package, *rest),
    )
    with pytest.raises(ValueError, match=rf"'{name}'.*`pip install {name}`"):
        open_trackers((name,), tmp_path, "run", CONFIG)


def test_a_folder_named_like_a_tracker_is_not_that_tracker(tmp_path, monkeypatch):
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    module.importlib.invalidate_caches()
    spec = module.importlib.util.find_spec("swanlab")
    if spec is not None and spec.origin is not None:
        pytest.skip("swanlab is installed")
    with pytest.raises(ValueError, match="pip install swanlab"):
        open_trackers(("swanlab",), tmp_path, "run", CONFIG)


@pytest.mark.parametrize("name", ["swanlab", "trackio"])
def test_the_optional_trackers_get_the_run_name_and_the_settings(tmp_path, monkeypatch, name):
    import sys
    import types

    seen = {}

    class Run:
        def log(self, values, step=None):
            seen.setdefault("logged", []).append((step, values))

        def finish(self):
            seen["finished"] = True

    class Config(dict):
        def update(self, values, allow_val_change=False):
            super().update(values)

    fake = types.ModuleType(name)
    fake.__spec__ = types.SimpleNamespace(origin="fake", name=name)
    fake.init = lambda **kwargs: seen.update(init=kwargs) or Run()
    fake.config = Config()
    fake.Image = lambda pixels, caption: (pixels.shape, caption)
    monkeypatch.setitem(sys.modules, name, fake)
    opened = open_trackers((name,), tmp_path, "my run", CONFIG)
    log(opened, {"epoch": 0, "update": 2, "reward/ocr": 0.5, "train/kl": math.nan}, step=2)
    log_images(opened, {"eval/samples": IMAGES}, step=2)
    close_trackers(opened)
    assert seen["init"]["project"] == "flow_grpo"
    assert "my run" in seen["init"].values()
    assert fake.config["seed"] == 42
    assert seen["logged"][0] == (2, {"epoch": 0, "reward/ocr": 0.5})
    images = [(2, {"eval/samples": [((2, 3, 3), ""), ((2, 3, 3), "")]})]
    assert seen["logged"][1:] == (images if name == "swanlab" else [])
    assert seen["finished"]


def test_other_processes_than_the_main_one_open_nothing(tmp_path, monkeypatch):
    class Second:
        is_main_process = False

    monkeypatch.setattr(module, "PartialState", Second)
    assert open_trackers(("tensorboard",), tmp_path, "run", CONFIG) == []
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="unknown tracker"):
        open_trackers(("nothing",), tmp_path, "run", CONFIG)


def test_of_a_clip_the_middle_frame_is_shown():
    shown = {}

    class Recorder:
        name = "tensorboard"
        tracker = type("Writer", (), {"flush": staticmethod(lambda: None)})

        def log_images(self, values, step, dataformats):
            shown.update(values)

    frames = torch.stack([IMAGES[0], IMAGES[1], IMAGES[0]])
    log_images([Recorder()], {"eval/samples": frames[None]}, step=1)
    assert shown["eval/samples"].shape == (1, 2, 3, 3)
    assert (shown["eval/samples"] == 255).all()
