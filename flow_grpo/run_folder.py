"""Own a run's folder: one writer, one configuration, and what it says at the end."""

import fcntl
import json
import logging
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from ml_collections import ConfigDict

from flow_grpo.metrics import METRICS_FILE, flatten, metrics_size, plain, read_metrics

logger = logging.getLogger(__name__)

CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "config.yaml", "summary.json", ".lock"
# What may change between a run and its resumption: how long, how fast, how it is watched.
NOT_IDENTITY = frozenset(
    {
        "num_epochs",
        "logdir",
        "run_name",
        "trackers",
        "eval_freq",
        "save_freq",
        "num_checkpoint_limit",
        "resume_from",
        "sample.batch_size",
        "sample.prompt_cache_size",
        "sample.offload_text_encoders",
        "reward.timeout_s",
        "reward.num_workers",
        "eval.batch_size",
        "eval.num_samples",
    }
)
VERSIONED = ("torch", "diffusers", "transformers", "accelerate", "peft", "flow_grpo")


class RunFolder:
    """A run's folder, held by one process until it ends."""

    def __init__(self, config: ConfigDict):
        """Create or reopen `logdir/run_name`.

        Raises:
            ValueError: another process holds it, or it belongs to another configuration.
        """
        self.path = Path(config.logdir) / config.run_name
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / METRICS_FILE
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give this run another name, or move it away")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / LOCK_FILE, "w")  # noqa: SIM115  # held until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ValueError(
                f"another process is training in {self.path}; "
                "wait for it, or give this run another name (--config.run_name=...)"
            ) from error
        try:
            self._claim(config)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def summary(self) -> dict | None:
        """Return summary.json, or None while there is none that can be read."""
        try:
            return json.loads((self.path / SUMMARY_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def forget_summary(self) -> None:
        """Delete summary.json, which a run that goes on has outlived."""
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    def write_summary(self, **facts) -> dict:
        """Write summary.json: what metrics.jsonl says of the run, and `facts`."""
        lines, _ = read_metrics(self.metrics)
        evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
        updates = [line for line in lines if "images" in line]
        seconds = sum(v or 0 for x in lines for k, v in x.items() if _is_wall_clock(k))
        deviations = [x.get("train/ratio_dev_first") for x in updates]
        images = sum(line.get("images", 0) for line in updates)
        summary = {
            "eval_before": _evaluation([x for x in evaluations if x["epoch"] == 0][:1]),
            "eval_after": _evaluation([x for x in evaluations if x["epoch"] > 0][-1:]),
            "epochs": len(updates),
            "images": images,
            "seconds": round(seconds, 1),
            "images_per_s": round(images / seconds, 3) if seconds else None,
            "ratio_dev_first_max": max((d for d in deviations if d is not None), default=None),
            **facts,
            "versions": versions(),
            "commit": commit(),
        }
        file = self.path / SUMMARY_FILE
        aside = file.with_suffix(".tmp")
        aside.write_text(json.dumps(plain(summary), indent=1) + "\n")
        os.replace(aside, file)
        return summary

    def _claim(self, config: ConfigDict) -> None:
        import yaml

        file = self.path / CONFIG_FILE
        settings = plain(config.to_dict())
        if file.is_file() and (metrics_size(self.metrics) or self.checkpoints.is_dir()):
            _check_identity(self.path, yaml.safe_load(file.read_text()) or {}, settings)
        aside = file.with_suffix(".tmp")
        aside.write_text(yaml.safe_dump(settings, sort_keys=False))
        os.replace(aside, file)


def _check_identity(path: Path, before: dict, now: dict) -> None:
    before, now = flatten(before), flatten(now)
    changed = [
        f"{key} ({before.get(key, 'absent')} -> {now.get(key, 'absent')})"
        for key in sorted({*before, *now} - NOT_IDENTITY)
        if before.get(key, "absent") != now.get(key, "absent")
    ]
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ValueError(
            f"{path} belongs to a run with another config: {', '.join(changed[:4])}{more}; "
            "give this run another name (--config.run_name=...) or delete the folder"
        )


def _is_wall_clock(key: str) -> bool:
    return key in ("time/rollout_s", "time/reward_s", "time/update_s", "time/eval_s")


def _evaluation(lines: list[dict]) -> dict | None:
    """Return {reward: mean, reward_stderr: ...} of an evaluation line."""
    if not lines:
        return None
    return {k.removeprefix("eval/"): v for k, v in lines[0].items() if k.startswith("eval/")}


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """Return the commit of the source tree, "-dirty" if it has changes, "unknown" outside git."""
    folder = Path(__file__).resolve().parent
    try:
        name = _git(folder, "rev-parse", "HEAD")
        return name + ("-dirty" if _git(folder, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
