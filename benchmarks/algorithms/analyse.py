"""Make markdown tables of what sweep.py left: held-out rewards, images and seconds by arm.

python benchmarks/algorithms/analyse.py OUT1 OUT2 --arms quickstart,dpo,sft
"""

import argparse
import gzip
import json
import math
import re
import statistics
from pathlib import Path

COLLAPSE = 0.1  # accuracy that a run called collapsed has lost, end against start
PHASES = ("time/rollout_s", "time/update_s")  # waiting for OCR depends on what runs beside
STEP = re.compile(r"train/step_(\d+)/")


class Run:
    """One job: its record and its metrics, with running sums of images and seconds."""

    def __init__(self, record: dict, lines: list[dict]):
        self.record = record
        self.arm = record.get("arm", record["name"])
        self.epochs = [line for line in lines if "reward/total" in line or "images" in line]
        self.evaluations = []
        images = seconds = 0.0
        for line in lines:
            if any(key.startswith("eval/") for key in line):
                self.evaluations.append({**line, "images": images, "seconds": seconds})
            else:
                images += line.get("images", 0)
                seconds += sum(line.get(phase, 0.0) for phase in PHASES)
        self.images, self.seconds = images, seconds

    def first(self, key: str) -> float:
        """Return a number of the evaluation before training; NaN if there is none."""
        return self.evaluations[0].get(key, math.nan) if self.evaluations else math.nan

    def last(self, key: str) -> float:
        """Return a number of the last evaluation; NaN if there is none."""
        return self.evaluations[-1].get(key, math.nan) if self.evaluations else math.nan

    def at(self, epoch: int, key: str) -> float:
        """Return a number of the evaluation after some epochs; NaN if there is none."""
        return next(
            (x.get(key, math.nan) for x in self.evaluations if x["epoch"] == epoch), math.nan
        )

    def reached(self, key: str, level: float, axis: str) -> float:
        """Return images or seconds at the first evaluation of at least a level; NaN if none."""
        for line in self.evaluations:
            if line.get(key, -math.inf) >= level:
                return line[axis]
        return math.nan

    @property
    def state(self) -> str:
        """Say how it ended."""
        if self.record["stopped"]:
            return "stopped"
        if self.record["code"]:
            return f"error {self.record['code']}"
        lost = self.first("eval/ocr") - self.last("eval/ocr")
        return "collapsed" if lost > COLLAPSE else "finished"


def load(folders: list[Path]) -> list[Run]:
    """Return the runs of several sweeps; of a name that ran twice, the one that came furthest."""
    best: dict[str, Run] = {}
    for folder in folders:
        lines: dict[str, list[dict]] = {}
        with gzip.open(folder / "metrics.jsonl.gz", "rt") as file:
            for line in map(json.loads, file):
                lines.setdefault(line.pop("job"), []).append(line)
        for text in (folder / "summary.jsonl").read_text().splitlines():
            record = json.loads(text)
            run = Run(record, lines.get(record["name"], []))
            name = record["name"]
            if name not in best or len(run.epochs) >= len(best[name].epochs):
                best[name] = run
    return list(best.values())


def by_arm(runs: list[Run], arms: list[str] | None = None) -> dict[str, list[Run]]:
    """Return the runs of each arm, in the order given or else in that of the runs."""
    arms = list(dict.fromkeys(run.arm for run in runs)) if arms is None else arms
    grouped = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    return {arm: members for arm, members in grouped.items() if members}


def spread(values: list[float], digits: int = 3) -> str:
    """Return mean ± standard deviation over runs; the mean alone of one; a dash of none."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def table(rows: list[dict[str, str]]) -> str:
    """Return a markdown table of rows that have the same keys."""
    if not rows:
        return ""
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def outcome_table(groups: dict[str, list[Run]], level: float) -> str:
    """Return a row an arm: before, after, change, images, seconds, and what a level costs."""
    rows = []
    for arm, runs in groups.items():
        change = [run.last("eval/ocr") - run.first("eval/ocr") for run in runs]
        got_there = [run for run in runs if math.isfinite(run.reached("eval/ocr", level, "images"))]
        states = [run.state for run in runs]
        rows.append(
            {
                "setting": arm,
                "runs": len(runs),
                "before": spread([run.first("eval/ocr") for run in runs]),
                "after": spread([run.last("eval/ocr") for run in runs]),
                "change": spread(change),
                "images": spread([run.images for run in runs], 0),
                "seconds": spread([run.seconds for run in runs], 0),
                f"images to {level:g}": spread(
                    [run.reached("eval/ocr", level, "images") for run in got_there], 0
                )
                + (f" ({len(got_there)} of {len(runs)})" if len(got_there) < len(runs) else ""),
                "state": ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)),
            }
        )
    return table(rows)


def progress_table(groups: dict[str, list[Run]], epochs: list[int], key: str) -> str:
    """Return a row an arm: a held-out number after each of some epochs, seconds an epoch."""
    rows = []
    for arm, runs in groups.items():
        row = {"setting": arm}
        for epoch in epochs:
            values = [run.at(epoch, key) for run in runs]
            there = sum(map(math.isfinite, values))
            row[f"{epoch} epochs"] = spread(values) + f" ({there})" * (there < len(runs))
        seconds = [sum(x.get(p, 0.0) for p in PHASES) for run in runs for x in run.epochs[2:30]]
        row["s an epoch (median)"] = f"{statistics.median(seconds):.2f}" if seconds else "-"
        rows.append(row)
    return table(rows)


def step_table(runs: list[Run], first: int = 10, last: int = 30) -> str:
    """Return a row a trained step: means over epochs first + 1 .. last and the runs."""
    lines = [line for run in runs for line in run.epochs[first:last]]
    steps = sorted({int(m[1]) for line in lines for key in line if (m := STEP.match(key))})
    rows = []
    for t in steps:
        row = {"step": t}
        for name in ("log_ratio_mean", "log_ratio_std", "clip_positive", "clip_negative"):
            values = [x[f"train/step_{t}/{name}"] for x in lines if f"train/step_{t}/{name}" in x]
            row[name] = f"{statistics.mean(values):.2g}" if values else "-"
        rows.append(row)
    return table(rows)


def reward_table(groups: dict[str, list[Run]]) -> str:
    """Return a row an arm: every reward of the evaluations before -> after."""
    keys = {
        key: None
        for runs in groups.values()
        for run in runs
        for line in run.evaluations
        for key in line
        if key.startswith("eval/") and not key.endswith(("_stderr", "/total"))
    }
    rows = []
    for arm, runs in groups.items():
        row = {"setting": arm, "runs": len(runs)}
        for key in keys:
            before, after = (
                spread([end(run, key) for run in runs]) for end in (Run.first, Run.last)
            )
            row[key.removeprefix("eval/")] = "-" if before == "-" else f"{before} -> {after}"
        rows.append(row)
    return table(rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="OUT of sweep.py")
    parser.add_argument("--arms", help="comma-separated, in this order; default: all")
    parser.add_argument("--level", type=float, default=0.7, help="accuracy whose cost is told")
    parser.add_argument("--epochs", default="0,10,20,30,40", help="of the table of progress")
    parser.add_argument("--reward", default="ocr", help="of the table of progress")
    parser.add_argument("--steps", action="store_true", help="log-ratios by denoising step instead")
    args = parser.parse_args()
    groups = by_arm(load(args.folders), args.arms.split(",") if args.arms else None)
    if args.steps:
        for arm, runs in groups.items():
            print(f"{arm}\n\n{step_table(runs)}")
        return
    epochs = [int(epoch) for epoch in args.epochs.split(",")]
    print(outcome_table(groups, args.level))
    print(reward_table(groups))
    print(progress_table(groups, epochs, f"eval/{args.reward}"))


if __name__ == "__main__":
    main()
