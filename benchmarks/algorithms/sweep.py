"""Run many short trainings side by side, and keep what a table or a curve needs of each.

python benchmarks/algorithms/sweep.py jobs.json OUT --parallel 8 --deadline 540

jobs.json is a list of {"name", "arguments": [...], "keep": false}, started in that order, each
with one thread. No job starts after the deadline; those that run then are stopped and count as
far as they came. OUT gets summary.jsonl (a line a job), metrics.jsonl.gz (all jobs' lines, each
with its job's name; appended job by job, so a kill loses the unfinished ones only), logs.tar.gz
and, of the jobs with `keep`, kept.tar.gz: adapters, samples and settings, no optimizer states.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_sd3.py"
KEPT_NUMBERS = re.compile(
    r"epoch|update|images|reward/(total|std)|group/zero_std_fraction|time/\w+|perf/\w+|failed/.*"
    r"|train/(loss|grad_norm|kl|clip_fraction|clip_positive|clip_negative|learning_rate)"
    r"|train/(step_\d+/)?(log_)?ratio_\w+|train/step_\d+/clip_\w+"
)
KEPT_FILES = re.compile(
    r"config\.yaml|samples/epoch-\d+/.*|checkpoints/checkpoint-\d+/(lora|transformer)/.*"
)
GRACE_S = 25.0  # to finish an epoch and save, after SIGTERM
POLL_S = 0.2


def main() -> int:
    """Run the jobs; exit 1 if one failed by itself (being stopped is no failure)."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds from the start")
    parser.add_argument("--last_start", type=float, help="no job starts later; default: deadline")
    parser.add_argument("--gpus", type=int, default=0, help="jobs take turns on this many")
    parser.add_argument("--stagger", type=float, default=0.5, help="seconds between two starts")
    parser.add_argument("--script", type=Path, default=SCRIPT, help="what a job runs")
    args = parser.parse_args()
    jobs = json.loads(args.jobs.read_text())
    if len({job["name"] for job in jobs}) < len(jobs):
        raise SystemExit(f"{args.jobs}: two jobs have one name")
    args.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(args.out, args.script)
    try:
        sweep.run(jobs, args)
    finally:
        sweep.close()
    print(f"{len(sweep.done)} of {len(jobs)} jobs ran, {sweep.seconds():.0f} s", flush=True)
    return int(any(record["code"] and not record["stopped"] for record in sweep.done))


class Sweep:
    """Jobs in progress, and the files that they leave."""

    def __init__(self, out: Path, script: Path):
        self.out, self.script = out, script
        self.work = Path(tempfile.mkdtemp(prefix="sweep-"))
        self.started = time.monotonic()
        self.running: list[tuple[dict, subprocess.Popen, float]] = []
        self.done: list[dict] = []

    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started

    def run(self, jobs: list[dict], args: argparse.Namespace) -> None:
        """Run the jobs in order until the deadline, then stop what runs."""
        waiting, last_start = list(jobs), args.last_start or args.deadline
        next_start = 0.0
        while (waiting and self.seconds() < last_start) or self.running:
            now = self.seconds()
            if now >= args.deadline:
                break
            may_start = waiting and now >= next_start and now < last_start
            if may_start and len(self.running) < args.parallel:
                self.start(waiting.pop(0), args.gpus)
                next_start = self.seconds() + args.stagger
            self.collect()
            time.sleep(POLL_S)
        self.stop()

    def start(self, job: dict, num_gpus: int) -> None:
        """Start one job in a process group of its own, on the GPU with the fewest jobs."""
        command = [sys.executable, str(self.script), *job["arguments"]]
        command += [f"--config.logdir={self.work}", f"--config.run_name={job['name']}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).resolve().parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        )
        used = [entry[0]["gpu"] for entry in self.running]
        job = {**job, "gpu": min(range(max(1, num_gpus)), key=used.count)}
        if num_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(job["gpu"])
        with open(self.work / f"{job['name']}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append((job, process, self.seconds()))

    def collect(self, *, stopped: bool = False) -> None:
        """Record the jobs that have ended."""
        for entry in list(self.running):
            job, process, began = entry
            if process.poll() is not None:
                self.running.remove(entry)
                self.record(job, process.returncode, began, stopped)

    def stop(self) -> None:
        """Ask the running jobs to end, wait GRACE_S at most, and kill the rest."""
        self.collect()
        _signal_all(self.running, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while self.running and time.monotonic() < until:
            self.collect(stopped=True)
            time.sleep(POLL_S)
        _signal_all(self.running, signal.SIGKILL)
        for _, process, _ in self.running:
            process.wait()
        self.collect(stopped=True)

    def record(self, job: dict, code: int, began: float, stopped: bool) -> None:
        """Append one job to the files of the sweep, and remove its folder."""
        folder = self.work / job["name"]
        lines = compact(folder / "metrics.jsonl")
        text = "".join(json.dumps({"job": job["name"], **line}) + "\n" for line in lines)
        with open(self.out / "metrics.jsonl.gz", "ab") as file:
            file.write(gzip.compress(text.encode()))
        record = {
            **job,
            "code": code,
            "stopped": stopped,
            "started_s": round(began, 1),
            "seconds": round(self.seconds() - began, 1),
            "epochs": sum("reward/total" in line for line in lines),
        }
        if code and not stopped:
            log = (self.work / f"{job['name']}.log").read_text(errors="replace")
            record["error"] = log.strip()[-500:]
        with open(self.out / "summary.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        self.done.append(record)
        told = [f"{line['eval/total']:.3f}" for line in lines if "eval/total" in line]
        print(
            f"{self.seconds():6.0f} s {job['name']}: code {code}{' (stopped)' * stopped}, "
            f"{record['epochs']} epochs, {record['seconds']:.0f} s, held-out {' '.join(told)}",
            flush=True,
        )
        if not job.get("keep"):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop what runs, pack logs and kept folders, and remove the temporary folder."""
        self.stop()
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            for log in sorted(self.work.glob("*.log")):
                archive.add(log, log.name)
        kept = [
            path
            for path in sorted(self.work.glob("*/**/*"))
            if path.is_file() and is_kept(path.relative_to(self.work))
        ]
        if kept:
            with tarfile.open(self.out / "kept.tar.gz", "w:gz") as archive:
                for path in kept:
                    archive.add(path, path.relative_to(self.work))
        shutil.rmtree(self.work, ignore_errors=True)


def compact(path: Path) -> list[dict]:
    """Return a metrics file's lines: those of evaluations whole, of the others what is plotted."""
    lines = []
    if path.exists():
        for text in path.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # cut off by a kill
                continue
            if not any(key.startswith("eval/") for key in line):
                line = {key: value for key, value in line.items() if KEPT_NUMBERS.fullmatch(key)}
            lines.append({key: _rounded(value) for key, value in line.items()})
    return lines


def is_kept(path: Path) -> bool:
    """Say whether NAME/... of a run folder goes into kept.tar.gz."""
    return bool(KEPT_FILES.fullmatch(Path(*path.parts[1:]).as_posix()))


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _signal_all(running: list, number: int) -> None:
    for _, process, _ in running:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main())
