"""Publish checkpoints atomically, verify them, and find the newest sound one.

A checkpoint is `checkpoints/checkpoint-N` after N epochs: `lora/` (what plain diffusers loads) or
`transformer/`, `state/` (what resuming needs) and `manifest.json` with every file's size and
SHA-256. It is written aside, synced and renamed, so a kill at any instant leaves the old ones.
No file is a pickle.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state"
NAME = re.compile(r"checkpoint-(\d+)")


def publish(folder: Path, epoch: int, write: Callable[[Path], None], record: dict) -> Path:
    """Write `checkpoint-<epoch>` by calling `write(temporary folder)`, then rename it into place.

    Args:
        folder: the run's `checkpoints`.
        epoch: finished epochs.
        write: fills the folder it is given.
        record: what `manifest.json` says besides the files (JSON).

    Raises:
        OSError: disk full or read-only; earlier checkpoints are untouched.
    """
    final, aside = folder / f"checkpoint-{epoch}", folder / f".writing-{epoch}"
    for left_behind in folder.glob(".writing-*"):  # by a kill
        shutil.rmtree(left_behind, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        record = {**record, "files": {str(f.relative_to(aside)): _digest(f) for f in files}}
        (aside / MANIFEST).write_text(json.dumps(record, indent=1) + "\n")
        for path in (*files, aside / MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside):
            _sync(path)
        replaced = folder / f".replaced-{epoch}"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            os.rename(final, replaced)
        os.rename(aside, final)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # the library's own word for a full disk
        kept = "earlier checkpoints are as they were"
        raise OSError(f"cannot save {final} ({error}); {kept}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def newest(folder: Path) -> tuple[Path, dict] | None:
    """Return the newest sound checkpoint and its manifest; name the unsound ones in the log."""
    for path in reversed(listed(folder)):
        problem = fault(path)
        if problem is None:
            return path, manifest(path)
        logger.warning("%s is not usable (%s); falling back to the one before", path, problem)
    return None


def listed(folder: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def manifest(path: Path) -> dict:
    """Return what `publish` recorded."""
    return json.loads((path / MANIFEST).read_text())


def fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file is as it was written."""
    try:
        files = dict(manifest(path)["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no readable {MANIFEST}: {type(error).__name__}"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _digest(path / name) != digest:
            return f"{name} differs from what was written"
    return None


def prune(folder: Path, limit: int) -> list[Path]:
    """Delete all but the newest `limit` checkpoints and the best one; return the deleted.

    The best is the one whose manifest has the highest `eval_total`.
    """
    paths = listed(folder)
    scores = {}
    for path in paths:
        try:
            scores[path] = manifest(path)["eval_total"]
        except (OSError, ValueError, KeyError, TypeError):
            scores[path] = None
    scored = [path for path in paths if scores[path] is not None]
    best = max(scored, key=lambda path: scores[path]) if scored else None
    doomed = [path for path in paths[: -max(1, limit)] if path != best]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return doomed


def set_aside(folder: Path, epoch: int) -> None:
    """Rename checkpoints later than `epoch`, where a run resumes: they are unsound or abandoned.

    Left in place, they would count as the newest, so that `prune` deletes what is saved next.
    """
    for path in listed(folder):
        if int(NAME.fullmatch(path.name)[1]) > epoch:
            aside = folder / f"left-{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logger.warning("%s is later than what is resumed; kept as %s", path, aside.name)


def save_state(folder: Path, tensors: dict[str, dict[str, Tensor]], scaler: dict | None) -> None:
    """Write `<kind>.safetensors` of every kind of tensors, such as "ema", and the scaler."""
    folder.mkdir()
    for kind, named in tensors.items():
        save_file(
            {name: tensor.contiguous() for name, tensor in named.items()}, _file(folder, kind)
        )
    (folder / "scaler.json").write_text(json.dumps(scaler))


def load_state(
    folder: Path, shapes: dict[str, torch.Size], kinds: Collection[str]
) -> tuple[dict[str, dict[str, Tensor]], dict | None]:
    """Return the tensors of every kind, the "optimizer" besides, and the scaler's state.

    Args:
        folder: that `save_state` wrote.
        shapes: of the trained parameters, by name.
        kinds: those that hold one tensor for every trained parameter.

    Raises:
        ValueError: the files were made by a run that trains other parameters.
    """
    tensors = {kind: _checked(_file(folder, kind), shapes) for kind in kinds}
    tensors["optimizer"] = load_file(_file(folder, "optimizer"))
    return tensors, json.loads((folder / "scaler.json").read_text())


def _file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.safetensors"


def _checked(file: Path, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    if not file.is_file():
        raise ValueError(
            f"{file} is missing: the checkpoint was made with another algorithm or without an "
            "average, or (on several nodes) lies on a disk that not all of them share"
        )
    loaded = load_file(file)
    if set(loaded) != set(shapes):
        odd = sorted(set(loaded) ^ set(shapes))
        raise ValueError(f"{file} holds other parameters than this run trains, such as {odd[0]}")
    for name, shape in shapes.items():
        if loaded[name].shape != shape:
            raise ValueError(
                f"{file}: {name} has shape {tuple(loaded[name].shape)}, but this run trains "
                f"{tuple(shape)}; resume with the settings that made it (train.lora_rank)"
            )
    return loaded


def _digest(path: Path) -> list:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return [path.stat().st_size, digest.hexdigest()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
