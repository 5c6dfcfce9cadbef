"""Read, cut and clean the numbers of a run folder. Imports neither torch nor accelerate."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """Return value as JSON can hold it.

    Scalars of numpy and torch become Python's, NaN and infinities None, tuples lists, and what
    JSON does not know its text.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def flatten(config: dict, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return nested settings as one dict of scalars, keys joined by dots.

    Sequences become JSON text and None the text "None", since TensorBoard takes neither.
    """
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten(value, f"{name}."))
            continue
        value = plain(value)
        flat[name] = json.dumps(value) if isinstance(value, list) else value
        if value is None:
            flat[name] = "None"
    return flat


def metrics_size(path: str | os.PathLike) -> int:
    """Return the bytes of a metrics file, 0 where there is none: a checkpoint's `metrics_bytes`."""
    return Path(path).stat().st_size if Path(path).exists() else 0


def truncate_metrics(path: str | os.PathLike, num_bytes: int) -> int:
    """Cut a metrics file to num_bytes, then to its last whole line; return the bytes kept.

    Called on resume with the checkpoint's `metrics_bytes`, before anything is logged, so that the
    lines made after the checkpoint are not there twice; 0 starts anew. A file shorter than that
    lost lines: it is kept, with a warning.
    """
    path = Path(path)
    size = metrics_size(path)
    if size < num_bytes:
        logger.warning(
            "%s has %d bytes, the checkpoint knew %d: lines were lost", path, size, num_bytes
        )
    if size == 0:
        return 0
    with open(path, "r+b") as file:
        kept = file.read(num_bytes).rfind(b"\n") + 1
        file.truncate(kept)
        file.flush()
        os.fsync(file.fileno())
    return kept


def read_metrics(path: str | os.PathLike) -> tuple[list[dict], int]:
    """Return the objects of a metrics file and how many of its lines could not be read."""
    path = Path(path)
    lines, unreadable = [], 0
    if not path.exists():
        return lines, unreadable
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            unreadable += 1
            continue
        if isinstance(line, dict):
            lines.append(line)
        else:
            unreadable += 1
    return lines, unreadable


def number(value: Any) -> float:
    """Return a JSON value as a float; NaN for null, text, booleans and infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return math.nan
    return float(value)
