"""Save a run's state and find it again."""

import logging
import math
from pathlib import Path

from flow_grpo import checkpoint
from flow_grpo.export import write_weights
from flow_grpo.session import Run, TrainState, main_process, on_all

logger = logging.getLogger(__name__)


def save(run: Run) -> None:
    """Publish a checkpoint of the current state and delete the old ones; all ranks must call it."""
    weights, tensors = run.policy.exported(), run.policy.state()
    main_process(run.accelerator, lambda: _publish(run, weights, tensors))


def _publish(run: Run, weights: dict, tensors: dict) -> None:
    state, folder = run.state, run.folder

    def write(path: Path) -> None:
        write_weights(run, weights, path)
        scaler = run.accelerator.scaler and run.accelerator.scaler.state_dict()
        checkpoint.save_state(path / checkpoint.STATE, tensors, scaler)

    best = run.eval_total if run.is_new_best else run.best_total
    record = {
        "epoch": state.epoch,
        "update": state.update,
        "metrics_bytes": run.folder.metrics.stat().st_size,
        "eval_total": run.eval_total,
        "resume_from": run.config.resume_from,
        "best_total": best if math.isfinite(best) else None,  # JSON has no -infinity
    }
    checkpoint.publish(folder.checkpoints, state.epoch, write, record)
    checkpoint.prune(folder.checkpoints, run.config.num_checkpoint_limit)


def restore(run: Run) -> int:
    """Load the newest sound checkpoint, or `resume_from`, on every process.

    Returns:
        The bytes of metrics.jsonl that belong to it; 0 for a run that starts anew.

    Raises:
        ValueError: `resume_from` is no sound checkpoint.
    """
    chosen = on_all(run.accelerator, lambda: _chosen(run))
    if chosen is None:
        return 0
    path, record = chosen
    policy = run.policy
    tensors, scaler = checkpoint.load_state(
        path / checkpoint.STATE, policy.shapes, ("parameters", *policy.alternatives)
    )
    policy.load_state(tensors)
    if scaler is not None and run.accelerator.scaler is not None:
        run.accelerator.scaler.load_state_dict(scaler)
    run.state = TrainState(record["epoch"], record["update"])
    run.best_total = -math.inf if record["best_total"] is None else record["best_total"]
    main_process(
        run.accelerator, lambda: checkpoint.set_aside(run.folder.checkpoints, run.state.epoch)
    )
    if run.is_main:
        logger.info("resumed from %s: epoch %d, update %d", path, run.state.epoch, run.state.update)
    return record["metrics_bytes"]


def _chosen(run: Run):
    asked, own = run.config.resume_from, run.folder.checkpoints
    found = checkpoint.newest(own)
    # What a run with this very resume_from has saved since is where the same command goes on.
    if not asked or (found and found[1].get("resume_from") == asked):
        return found
    problem = checkpoint.fault(Path(asked))
    if problem is not None:
        raise ValueError(f"resume_from ({asked}) is no usable checkpoint: {problem}")
    record = checkpoint.manifest(Path(asked))
    if Path(asked).resolve().parent != own.resolve():
        record["metrics_bytes"] = 0  # of another run's file
    return Path(asked), record
