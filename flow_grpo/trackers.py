"""Send metrics and images where people look: metrics.jsonl always, other trackers by name."""

import difflib
import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.tracking import (
    GeneralTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    on_main_process,
)

from flow_grpo.metrics import METRICS_FILE, flatten, metrics_size, plain, truncate_metrics

__all__ = [
    "JsonlTracker",
    "close_trackers",
    "log",
    "log_images",
    "metrics_size",
    "open_trackers",
    "truncate_metrics",
]

DEFAULT_PROJECT = "flow_grpo"


class JsonlTracker(GeneralTracker):
    """Append every call of log as one JSON object a line to <logging_dir>/metrics.jsonl.

    The file is closed after each line, so a killed run loses none. NaN and infinities are written
    as null. The configuration is not stored here: config.yaml has it.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike):
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir) / METRICS_FILE

    @on_main_process
    def start(self):
        """Make the file and its folder where they are missing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    @property
    def tracker(self):
        """Return the path of the file."""
        return self.path

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs):
        """Write one line; step is stored as "update" where the values do not name one."""
        if step is not None and "update" not in values:
            values = {"update": step, **values}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(plain(values), allow_nan=False) + "\n")


class Backend(NamedTuple):
    """An external tracker: its package, how it is built, whether it takes nested settings."""

    package: str
    build: Callable[[Path, str, int], GeneralTracker]
    nested_config: bool


def _tensorboard(run_dir: Path, run_name: str, update: int) -> GeneralTracker:
    purge = {"purge_step": update + 1} if update else {}
    return TensorBoardTracker("tensorboard", run_dir, **purge)


def _wandb(run_dir: Path, run_name: str, update: int) -> GeneralTracker:
    id_file = run_dir / "wandb" / "flow_grpo_run_id"
    settings = {"dir": str(run_dir), "name": run_name}
    if id_file.exists():
        settings["resume"] = "allow"
    else:
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(secrets.token_hex(4))
    settings["id"] = id_file.read_text().strip()
    return WandBTracker(os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT), **settings)


def _swanlab(run_dir: Path, run_name: str, update: int) -> GeneralTracker:
    logs = run_dir / "swanlab"
    logs.mkdir(parents=True, exist_ok=True)
    return SwanLabTracker(DEFAULT_PROJECT, experiment_name=run_name, logdir=str(logs))


def _trackio(run_dir: Path, run_name: str, update: int) -> GeneralTracker:
    return TrackioTracker(DEFAULT_PROJECT, name=run_name, resume="allow" if update else "never")


BACKENDS = {
    "tensorboard": Backend("tensorboard", _tensorboard, nested_config=False),
    "wandb": Backend("wandb", _wandb, nested_config=True),
    "swanlab": Backend("swanlab", _swanlab, nested_config=True),
    "trackio": Backend("trackio", _trackio, nested_config=False),
}


def _is_installed(package: str) -> bool:
    # A folder ./wandb, such as W&B itself leaves, is found as a namespace package: no origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the external trackers asked for, each once; "none" and "jsonl" (always on) drop out.

    Raises ValueError for a name that does not exist and for a package that is not installed.
    """
    wanted = tuple(dict.fromkeys(name for name in names if name not in ("none", "jsonl")))
    for name in wanted:
        if name not in BACKENDS:
            nearest = difflib.get_close_matches(name, BACKENDS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"unknown tracker {name!r}; there are {', '.join(BACKENDS)} and none; "
                f"the nearest is {nearest!r}"
            )
        if not _is_installed(BACKENDS[name].package):
            raise ValueError(
                f"tracker {name!r} needs a package that is not installed: "
                f"`pip install {BACKENDS[name].package}`, or leave {name!r} out of the trackers"
            )
    return wanted


def _start(name: str, tracker: GeneralTracker) -> None:
    try:
        tracker.start()
    except Exception as error:
        if name == "wandb" and type(error).__module__.startswith("wandb"):
            raise ValueError(
                f"W&B did not start: {error}; run `wandb login`, or set WANDB_MODE=offline "
                "or WANDB_MODE=disabled"
            ) from error
        raise


def open_trackers(
    names: Sequence[str],
    run_dir: str | os.PathLike,
    run_name: str,
    config_dict: dict,
    *,
    update: int = 0,
) -> list[GeneralTracker]:
    """Open metrics.jsonl and the trackers asked for; only the main process gets any.

    update: where a resumed run stands, 0 for a new one; TensorBoard hides what was logged after it.
    Raises ValueError as check_trackers does, on every process, and where W&B cannot start.
    """
    wanted = check_trackers(names)
    if not PartialState().is_main_process:
        return []
    run_dir = Path(run_dir).absolute()
    trackers: list[GeneralTracker] = [JsonlTracker(run_name, run_dir)]
    trackers[0].start()
    for name in wanted:
        backend = BACKENDS[name]
        tracker = backend.build(run_dir, run_name, update)
        _start(name, tracker)
        # TensorBoard would show the settings of every resume as one more run.
        if not (name == "tensorboard" and update):
            tracker.store_init_configuration(
                plain(config_dict) if backend.nested_config else flatten(config_dict)
            )
        trackers.append(tracker)
    return trackers


def log(trackers: Sequence[GeneralTracker], values: dict[str, Any], step: int) -> None:
    """Log scalars at an update: metrics.jsonl gets all, the others the finite numbers."""
    values = plain(values)
    numbers = {
        key: value
        for key, value in values.items()
        if isinstance(value, (int, float)) and key != "update"
    }
    for tracker in trackers:
        tracker.log(values if tracker.name == "jsonl" else numbers, step=step)


def log_images(
    trackers: Sequence[GeneralTracker],
    images: dict[str, torch.Tensor],
    step: int,
    captions: dict[str, list[str]] | None = None,
) -> None:
    """Log images {name: (n, 3, h, w) float in [0, 1]}, with captions where a tracker shows them.

    Of clips (n, f, 3, h, w) the middle frame is shown. Trackers that take no images are skipped.
    """
    for name, batch in images.items():
        batch = batch if batch.ndim == 4 else batch[:, batch.shape[1] // 2]
        pixels = batch.detach().float().nan_to_num(0).clamp(0, 1).mul(255).round().byte()
        pixels = pixels.permute(0, 2, 3, 1).cpu().numpy()
        texts = (captions or {}).get(name) or [""] * len(pixels)
        for tracker in trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({name: pixels}, step=step, dataformats="NHWC")
                tracker.tracker.flush()
            elif tracker.name in ("wandb", "swanlab"):
                module = importlib.import_module(tracker.name)
                shown = [
                    module.Image(item, caption=text)
                    for item, text in zip(pixels, texts, strict=True)
                ]
                tracker.log({name: shown}, step=step)


def close_trackers(trackers: Sequence[GeneralTracker]) -> None:
    """Finish every tracker; wandb uploads what is left."""
    for tracker in trackers:
        tracker.finish()
