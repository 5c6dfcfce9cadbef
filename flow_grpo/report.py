"""Build report.html of a run folder: numbers, curves, samples before and after, settings.

One file that needs no network. It can be built at any moment of a run, from whatever is there.
"""

import base64
import datetime
import io
import json
import math
import os
from pathlib import Path

import yaml

from flow_grpo.curves import Series, draw_areas, draw_curves
from flow_grpo.metrics import METRICS_FILE, flatten, number, read_metrics
from flow_grpo.samples import read_samples

MAX_COLUMNS = 6  # before, up to four evaluations in between, after
MAX_ROWS = 12
CRISP_BELOW = 128  # pixels: smaller images are shown enlarged with hard edges
THUMBNAIL = 256  # pixels: larger images are embedded at this size

# metric, title, what it says
PANELS = (
    (
        "train/ratio_mean",
        "Ratio, mean - 1",
        "exp(log-ratio) over the epoch, as the algorithm defines it; 0 is on policy",
        -1.0,
    ),
    (
        "train/ratio_dev_first",
        "First |ratio - 1| of the epoch",
        "before any update: 0 but for rounding",
        0.0,
    ),
    ("train/clip_fraction", "Clip fraction", "share of the rows outside the clip range", 0.0),
    ("train/clip_positive", "Clipped, positive advantage", "off-policy updates' rows", 0.0),
    ("train/clip_negative", "Clipped, negative advantage", "off-policy updates' rows", 0.0),
    (
        "train/implicit_accuracy",
        "Implicit accuracy",
        "share of pairs whose winner gained more",
        0.0,
    ),
    ("train/winner_change", "Winner's change", "its flow-matching error against the old one", 0.0),
    ("train/loser_change", "Loser's change", "its flow-matching error against the old one", 0.0),
    ("train/flow_matching", "Flow-matching error", "of the images that are imitated", 0.0),
    ("train/old_distance", "Distance to the old policy", "mean squared, of velocities", 0.0),
    ("train/kl", "KL to the reference", "per latent element", 0.0),
    ("train/grad_norm", "Gradient norm", "before clipping", 0.0),
    ("train/learning_rate", "Learning rate", "", 0.0),
    (
        "group/zero_std_fraction",
        "Groups without a signal",
        "share of groups whose rewards are all equal",
        0.0,
    ),
)

PHASES = ("time/rollout_s", "time/reward_s", "time/update_s", "time/eval_s")  # bottom to top


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_config(path: Path) -> tuple[dict, str]:
    """Return the settings and, where the file is not plain YAML, its text instead."""
    if not path.exists():
        return {}, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}, text
    return (value, "") if isinstance(value, dict) else ({}, text)


def _series(lines: list[dict], key: str, offset: float = 0.0) -> Series:
    """Return the (epoch, value) pairs of a metric; null values stay as gaps."""
    pairs = [
        (number(line.get("epoch")), number(line[key]) + offset) for line in lines if key in line
    ]
    pairs = [(epoch, value) for epoch, value in pairs if not math.isnan(epoch)]
    return Series([epoch for epoch, _ in pairs], [value for _, value in pairs])


def _is_phase(key: str) -> bool:
    return key.startswith("time/") and key.endswith("_s")


def _reward_names(lines: list[dict]) -> list[str]:
    """Return the rewards that were logged, the total last."""
    names: dict[str, None] = {}
    for line in lines:
        for key in line:
            kind, _, name = key.partition("/")
            if kind in ("reward", "eval") and name != "std" and not name.endswith("_stderr"):
                names[name] = None
    rewards = [name for name in names if name != "total"]
    # The total of a single reward of weight 1 is that reward again.
    repeated = len(rewards) == 1 and all(
        line[f"{kind}/total"] == line.get(f"{kind}/{rewards[0]}")
        for line in lines
        for kind in ("reward", "eval")
        if f"{kind}/total" in line
    )
    return rewards + (["total"] if "total" in names and not repeated else [])


def _figures(lines: list[dict]) -> list[dict]:
    """Return the curves that have data: {title, note, svg, legend}."""
    known = [
        epoch for epoch in (number(line.get("epoch")) for line in lines) if not math.isnan(epoch)
    ]
    if not known:
        return []
    epochs = (min(known), max(known))
    figures = []
    for name in _reward_names(lines):
        train, held_out = _series(lines, f"reward/{name}"), _series(lines, f"eval/{name}")
        errors = [
            number(line.get(f"eval/{name}_stderr")) for line in lines if f"eval/{name}" in line
        ]
        errors = errors if len(errors) == len(held_out.x) else None
        svg = draw_curves(train, held_out, errors, epochs=epochs)
        if svg:
            legend = [("train", "rollouts"), ("held-out", "held-out \u00b1 one standard error")]
            figures.append({"title": f"Reward: {name}", "note": "", "svg": svg, "legend": legend})
    for key, title, note, offset in PANELS:
        svg = draw_curves(_series(lines, key, offset), epochs=epochs)
        if svg:
            figures.append({"title": title, "note": note, "svg": svg, "legend": []})
    phases = sorted({key for line in lines for key in line if _is_phase(key)})
    phases.sort(key=lambda key: PHASES.index(key) if key in PHASES else len(PHASES))
    svg, shown = draw_areas({key: _series(lines, key) for key in phases})
    if svg:
        legend = [(f"phase-{i}", key[5:-2]) for i, key in enumerate(shown)]
        figures.append(
            {"title": "Seconds by phase", "note": "an epoch", "svg": svg, "legend": legend}
        )
    return figures


def _evaluation(summary: dict, key: str) -> dict[str, float]:
    """Return {reward: value} of a summary's evaluation; its keys may carry the metrics' "eval/"."""
    values = summary.get(key)
    if not isinstance(values, dict):
        return {}
    return {name.removeprefix("eval/"): number(value) for name, value in values.items()}


def _headline(lines: list[dict], summary: dict) -> dict:
    """Return the held-out means before and after.

    {before, after: labels, rows: [{name, before, after, change, direction}]}; after is "" as long
    as there is one evaluation only.
    """
    evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    before = {k[5:]: number(v) for k, v in first.items() if k.startswith("eval/")}
    after = {k[5:]: number(v) for k, v in last.items() if k.startswith("eval/")}
    before |= _evaluation(summary, "eval_before")
    after |= _evaluation(summary, "eval_after")
    single = len(evaluations) == 1 and not _evaluation(summary, "eval_after")
    names = [name for name in {**before, **after} if not name.endswith("_stderr")]
    if len(names) == 2 and all(
        len({values.get(name) for name in names}) == 1 for values in (before, after)
    ):
        names = [name for name in names if name != "total"]
    rows = []
    for name in sorted(names, key=lambda name: name == "total"):
        start = before.get(name, math.nan)
        end = math.nan if single else after.get(name, math.nan)
        change = round(end - start, 3) + 0.0  # as shown: one that rounds to 0 has no direction
        rows.append(
            {
                "name": name,
                "before": _with_error(start, before.get(f"{name}_stderr", math.nan)),
                "after": _with_error(end, after.get(f"{name}_stderr", math.nan)),
                "change": "-" if math.isnan(change) else f"{change:+.3f}",
                "direction": "up" if change > 0 else "down" if change < 0 else "",
            }
        )
    labels = (
        f"epoch {first.get('epoch', 0)}",
        f"epoch {last.get('epoch', summary.get('epochs', '?'))}",
    )
    return {"before": labels[0], "after": "" if single else labels[1], "rows": rows}


def _with_error(value: float, stderr: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.3f}" if math.isnan(stderr) else f"{value:.3f} \u00b1 {stderr:.3f}"


def _facts(lines: list[dict], summary: dict, config: dict) -> list[tuple[str, str]]:
    """Return the run's own numbers as (name, text), those that are known."""
    trained = [line for line in lines if any(key.startswith(("train/", "reward/")) for key in line)]
    planned = flatten(config).get("num_epochs")
    epochs = summary.get("epochs", len({line.get("epoch") for line in trained}))
    seconds = number(summary.get("seconds"))
    if math.isnan(seconds):
        times = [number(value) for line in lines for key, value in line.items() if _is_phase(key)]
        seconds = sum(t for t in times if not math.isnan(t))
    rates = [rate for rate in _series(lines, "perf/images_per_s").y if not math.isnan(rate)]
    rate = number(summary.get("images_per_s", sum(rates) / len(rates) if rates else None))
    deviation = [d for d in _series(lines, "train/ratio_dev_first").y if not math.isnan(d)]
    largest = number(summary.get("ratio_dev_first_max", max(deviation, default=None)))
    memory = number(summary.get("peak_memory_gib"))
    facts = [
        (
            "Epochs",
            f"{epochs}" + (f" of {planned}" if planned is not None and planned != epochs else ""),
        ),
        ("Images", f"{summary['images']:,}" if isinstance(summary.get("images"), int) else ""),
        ("Minutes", f"{seconds / 60:.1f}" if seconds else ""),
        ("Images/s", "" if math.isnan(rate) else f"{rate:.3g}"),
        ("Peak memory", "" if math.isnan(memory) else f"{memory:.2f} GiB"),
        ("Largest first |ratio - 1|", "" if math.isnan(largest) else f"{largest:.2g}"),
    ]
    return [(name, text) for name, text in facts if text]


def _provenance(summary: dict) -> list[tuple[str, str]]:
    versions = summary.get("versions")
    pairs = [("commit", str(summary["commit"]))] if summary.get("commit") else []
    if isinstance(versions, dict):
        pairs += [(str(name), str(version)) for name, version in versions.items()]
    elif versions:
        pairs.append(("versions", str(versions)))
    return pairs


def _image(path: Path) -> dict | None:
    """Return {src, crisp} of an image file as a data URL; None where it is missing or broken."""
    from PIL import Image

    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as image:
            size, kind = max(image.size), image.format.lower()
            if getattr(image, "is_animated", False):
                data = _small_clip(image)
            elif size > THUMBNAIL:
                image = image.convert("RGB")
                image.thumbnail((THUMBNAIL, THUMBNAIL), reducing_gap=2.0)
                buffer = io.BytesIO()
                image.save(buffer, "JPEG", quality=85)
                data, kind = buffer.getvalue(), "jpeg"
            else:
                image.load()
    except (OSError, ValueError, SyntaxError):
        return None
    return {
        "src": f"data:image/{kind};base64,{base64.b64encode(data).decode()}",
        "crisp": size < CRISP_BELOW,
    }


def _small_clip(clip) -> bytes:
    """Return every other frame of a clip at the size of other images: 72 of them make a page."""
    frames = []
    for place in range(clip.n_frames):
        clip.seek(place)  # every one, or what is cut off is not seen
        clip.load()
        if place % 2 == 0:
            frame = clip.convert("RGB")
            frame.thumbnail((THUMBNAIL, THUMBNAIL))
            frames.append(frame)
    buffer, duration = io.BytesIO(), 2 * clip.info.get("duration", 0)
    frames[0].save(
        buffer, clip.format, save_all=True, append_images=frames[1:], duration=duration, loop=0,
        quality=70,
    )  # fmt: skip
    return buffer.getvalue()


def _evenly(items: list, num: int) -> list:
    """Return at most num items: the first, the last, and evenly placed ones between."""
    if len(items) <= num:
        return items
    return [items[round(i * (len(items) - 1) / (num - 1))] for i in range(num)]


def _scores(entry: dict) -> list[tuple[str, str]]:
    scores = entry.get("scores")
    if not isinstance(scores, dict):
        return []
    values = {str(name): number(value) for name, value in scores.items()}
    # One reward of weight 1 and its total say the same.
    if len(values) == 2 and "total" in values and len(set(values.values())) == 1:
        del values["total"]
    return [
        (name, "no score" if math.isnan(value) else f"{value:.2f}")
        for name, value in values.items()
    ]


def _grid(run_dir: Path) -> dict:
    """Return {epochs, rows: [{prompt, references, cells}], num_prompts, edits}.

    A cell is {image: {src, crisp} or None, scores}, or None where an evaluation lacks the sample.
    References are images, of runs that edit them (`edits`).
    """
    samples = read_samples(run_dir)
    epochs = _evenly(list(samples), MAX_COLUMNS)
    by_file = {epoch: {str(entry["file"]): entry for entry in samples[epoch]} for epoch in epochs}
    files = sorted({file for entries in by_file.values() for file in entries})
    rows = []
    for file in files[:MAX_ROWS]:
        entries = [by_file[epoch].get(file) for epoch in epochs]
        cells = [e and {"image": _image(e["path"]), "scores": _scores(e)} for e in entries]
        prompt = next((str(e.get("prompt", "")) for e in entries if e), "")
        paths = next((e["references"] for e in entries if e), [])
        rows.append({"prompt": prompt, "references": list(map(_image, paths)), "cells": cells})
    edits = any(row["references"] for row in rows)
    return {"epochs": epochs, "rows": rows, "num_prompts": len(files), "edits": edits}


def render_report(run_dir: str | os.PathLike) -> str:
    """Return the report of a run folder as HTML.

    Raises ValueError where the folder is no run: it holds neither config.yaml nor metrics.jsonl.
    """
    import jinja2

    run_dir = Path(run_dir)
    if not any((run_dir / name).is_file() for name in ("config.yaml", METRICS_FILE)):
        raise ValueError(
            f"{run_dir} is no run folder: it holds neither config.yaml nor {METRICS_FILE}; "
            "name a folder that a training made, such as runs/NAME"
        )
    lines, unreadable = read_metrics(run_dir / METRICS_FILE)
    summary = _read_json(run_dir / "summary.json")
    config, config_text = _read_config(run_dir / "config.yaml")
    template = (Path(__file__).parent / "assets" / "report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        name=run_dir.resolve().name,
        finished=bool(summary),
        written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        headline=_headline(lines, summary),
        facts=_facts(lines, summary, config),
        provenance=_provenance(summary),
        figures=_figures(lines),
        grid=_grid(run_dir),
        config=flatten(config),
        config_text=config_text,
        unreadable=unreadable,
    )


def write_report(run_dir: str | os.PathLike) -> Path:
    """Write report.html into a run folder, replacing the one before in one step; return its path.

    Raises ValueError as render_report does.
    """
    path = Path(run_dir) / "report.html"
    html = render_report(run_dir)
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    aside.write_text(html, encoding="utf-8")
    aside.replace(path)
    return path
