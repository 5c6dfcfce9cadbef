"""Draw what sweep.py left: curves, over-optimisation, ratios by step. One PNG each.

python benchmarks/algorithms/plots.py curves OUT1 OUT2 --arms quickstart,dpo --png curves.png
"""

import argparse
import math
import re
import statistics
from pathlib import Path

import matplotlib
from analyse import Run, by_arm, load

matplotlib.use("Agg")
from matplotlib import pyplot

STEP = re.compile(r"train/step_(\d+)/")
COLORS = matplotlib.colormaps["tab10"].colors
LABELS = {  # title, and the sign that makes it a distance
    "ocr": ("trained: OCR accuracy", 1),
    "second_ocr": ("not trained: second OCR engine", 1),
    "sign_distance": ("not trained: distance to the true sign", -1),
    "background": ("not trained: error of the background", -1),
}


def curves(groups: dict[str, list[Run]], key: str = "eval/ocr"):
    """Plot a held-out reward against images and against seconds; bands span the seeds."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 6.5), sharey=True, layout="constrained")
    for axis, across, unit in zip(
        axes, ("images", "seconds"), ("thousand images", "seconds of sampling and updates")
    ):
        for i, (arm, runs) in enumerate(groups.items()):
            scale = 1000 if across == "images" else 1
            style = {"color": COLORS[i % 10], "linestyle": "-" if i < 10 else "--"}
            x, low, mean, high = _band(runs, key, across)
            axis.plot([value / scale for value in x], mean, label=arm, **style)
            axis.fill_between(
                [value / scale for value in x], low, high, color=style["color"], alpha=0.08, lw=0
            )
        axis.set_xlabel(unit)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out OCR accuracy")
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def over_optimisation(groups: dict[str, list[Run]]):
    """Plot the trained reward and each that was only watched, a panel each."""
    lines = [line for runs in groups.values() for run in runs for line in run.evaluations]
    names = [name for name in LABELS if any(f"eval/{name}" in line for line in lines)]
    figure, axes = pyplot.subplots(
        -(-len(names) // 2), 2, figsize=(9.5, 3.4 * -(-len(names) // 2)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axis, name in zip(axes.flat, names):
        title, sign = LABELS[name]
        for i, (arm, runs) in enumerate(groups.items()):
            x, low, mean, high = _band(runs, f"eval/{name}", "images")
            x = [value / 1000 for value in x]
            low, mean, high = ([sign * value for value in band] for band in (low, mean, high))
            axis.plot(x, mean, color=COLORS[i % 10], label=arm)
            axis.fill_between(x, low, high, color=COLORS[i % 10], alpha=0.15, lw=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("thousand images of training")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    return figure


def ratios(groups: dict[str, list[Run]], *, first: int = 10, last: int = 30):
    """Plot mean and std of the log-ratio, and who is clipped, against the step; a row an arm.

    Means over the seeds' epochs first + 1 .. last, as in analyse.py's table of steps.
    """
    figure, axes = pyplot.subplots(
        len(groups), 3, figsize=(11, 2.7 * len(groups)), layout="constrained", squeeze=False
    )
    for row, (arm, runs) in zip(axes, groups.items()):
        epochs = [line for run in runs for line in run.epochs[first:last]]
        steps = sorted({int(m[1]) for line in epochs for k in line if (m := STEP.match(k))})

        def mean(name: str, epochs=epochs, steps=steps) -> list[float]:
            return [_mean(line.get(f"train/step_{t}/{name}") for line in epochs) for t in steps]

        row[0].bar(steps, mean("log_ratio_mean"), color=COLORS[0])
        row[1].bar(steps, mean("log_ratio_std"), color=COLORS[1])
        for shift, (name, color) in enumerate((("clip_positive", "C2"), ("clip_negative", "C3"))):
            where = [step + 0.4 * (shift - 0.5) for step in steps]
            label = name.removeprefix("clip_")
            row[2].bar(where, mean(name), width=0.4, color=color, label=f"{label} advantage")
        row[0].axhline(0, color="black", lw=0.6)
        row[0].set_ylabel(arm, fontsize=10)
        row[2].set_ylim(0, None)
        row[2].legend(fontsize=8)
        for axis in row:
            axis.set_xticks(steps)
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
            axis.grid(alpha=0.3, axis="y")
    for axis, title in zip(axes[0], ("mean of the log-ratio", "its std", "share clipped")):
        axis.set_title(title, fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("denoising step")
    return figure


def _band(runs: list[Run], key: str, across: str):
    """Return (x, least, mean, greatest) at the epochs at which every run was evaluated."""
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for line in run.evaluations:
            value = line.get(key)
            if value is not None and math.isfinite(value):
                found.setdefault(line["epoch"], []).append((line[across], value))
    points = [
        (
            statistics.mean(x for x, _ in found[epoch]),
            min(y for _, y in found[epoch]),
            statistics.mean(y for _, y in found[epoch]),
            max(y for _, y in found[epoch]),
        )
        for epoch in sorted(found)
        if len(found[epoch]) == len(runs)
    ]
    return tuple([point[i] for point in points] for i in range(4))


def _mean(values) -> float:
    values = [value for value in values if value is not None]
    return statistics.mean(values) if values else math.nan


FIGURES = {"curves": curves, "over_optimisation": over_optimisation, "ratios": ratios}


def main() -> None:
    """Write one figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("folders", type=Path, nargs="+", help="OUT of sweep.py")
    parser.add_argument("--arms", help="comma-separated, in this order; default: all")
    parser.add_argument("--names", help="comma-separated, what to call the arms")
    parser.add_argument("--png", type=Path, required=True)
    parser.add_argument("--dpi", type=int, default=110)
    args = parser.parse_args()
    groups = by_arm(load(args.folders), args.arms.split(",") if args.arms else None)
    if args.names:
        groups = dict(zip(args.names.split(","), groups.values(), strict=True))
    FIGURES[args.figure](groups).savefig(args.png, dpi=args.dpi)
    print(f"{args.png}: {args.png.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
