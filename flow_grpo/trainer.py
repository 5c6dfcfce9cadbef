"""Collect, score, update: one loop for every model and algorithm."""

import logging
import resource
import time
from functools import partial

import torch

from flow_grpo import evaluation, resume, samples
from flow_grpo.collecting import collect, score
from flow_grpo.metrics import truncate_metrics
from flow_grpo.progress import StopRequest, progress_bar
from flow_grpo.report import write_report
from flow_grpo.session import Run, main_process
from flow_grpo.trackers import close_trackers, log, log_images, open_trackers
from flow_grpo.updating import update

logger = logging.getLogger(__name__)


def train(run: Run) -> dict | None:
    """Train to `num_epochs`, resuming from the run's folder; return the summary (main process)."""
    metrics_bytes = resume.restore(run)
    main_process(run.accelerator, lambda: _open(run, metrics_bytes))
    with StopRequest() as stop:
        _run_epochs(run, stop)
        return _finish(run)


def _open(run: Run, metrics_bytes: int) -> None:
    """Make the run folder's files those of the state that was restored; open the trackers."""
    run.folder.forget_summary()  # reports of the running run would show an earlier end
    truncate_metrics(run.folder.metrics, metrics_bytes)
    run.trackers = open_trackers(
        run.config.trackers,
        run.folder.path,
        run.config.run_name,
        run.config.to_dict(),
        update=run.state.update,
    )


def _run_epochs(run: Run, stop: StopRequest) -> None:
    if run.state.epoch == 0:
        _evaluate(run)
    while run.state.epoch < run.config.num_epochs:
        metrics = _train_epoch(run)
        main_process(run.accelerator, partial(log, run.trackers, metrics, run.state.update))
        logger.info("%s", _told(run, metrics))
        stopping = stop.agreed(run.accelerator)
        finished = run.state.epoch >= run.config.num_epochs
        run.eval_total = None
        if run.state.epoch % run.config.eval_freq == 0 or finished:
            _evaluate(run)
        if run.state.epoch % run.config.save_freq == 0 or finished or stopping or run.is_new_best:
            resume.save(run)
            if run.is_new_best:
                run.best_total = run.eval_total
        if stopping:
            logger.info("stopped after epoch %d; the same command resumes", run.state.epoch)
            break


def _train_epoch(run: Run) -> dict[str, float]:
    """Collect, score and update once; return the epoch's metrics."""
    started = time.perf_counter()
    with progress_bar(run.accelerator, "rollout", run.plan.samples_per_rank) as bar:
        collected = collect(run, run.state.epoch, bar)
        sampled = time.perf_counter()
        scores, reward_metrics = score(run, collected)
    scored = time.perf_counter()
    update_metrics = update(run, collected, scores)
    ended = time.perf_counter()
    run.state.epoch += 1
    return {
        "epoch": run.state.epoch - 1,
        "update": run.state.update,
        "images": run.plan.samples_per_epoch,
        **reward_metrics,
        **update_metrics,
        "time/rollout_s": sampled - started,
        "time/reward_s": scored - sampled,
        "time/update_s": ended - scored,
        "perf/images_per_s": run.plan.samples_per_epoch / (ended - started),
    }


def _told(run: Run, metrics: dict[str, float]) -> str:
    """Return an epoch's line on the screen."""
    numbers = {
        "reward": "reward/total",
        "std": "reward/std",
        "clipped": "train/clip_fraction",
        "grad norm": "train/grad_norm",
    }
    told = [f"{name} {metrics[key]:.3g}" for name, key in numbers.items() if key in metrics]
    seconds = sum(metrics[f"time/{phase}_s"] for phase in ("rollout", "reward", "update"))
    return f"epoch {run.state.epoch}/{run.config.num_epochs}: {', '.join(told)}, {seconds:.1f} s"


def _evaluate(run: Run) -> None:
    """Evaluate, log, keep samples, and refresh the report."""
    started = time.perf_counter()
    with progress_bar(
        run.accelerator, "evaluate", -(-len(run.eval_prompts) // run.plan.world_size)
    ) as bar:
        metrics, kept = evaluation.evaluate(run, bar.update)
    metrics["time/eval_s"] = time.perf_counter() - started
    run.eval_total = metrics.get("eval/total")
    main_process(run.accelerator, lambda: _show(run, metrics, kept))


def _show(run: Run, metrics: dict[str, float], kept: dict) -> None:
    line = {"epoch": run.state.epoch, "update": run.state.update, **metrics}
    log(run.trackers, line, run.state.update)
    samples.save_samples(run.folder.path, run.state.epoch, **kept)
    if len(kept["images"]):
        shown, captions = kept["images"], {"eval/images": kept["prompts"]}
        if kept["references"] is not None:
            shown = samples.beside(kept["references"], shown)
        log_images(run.trackers, {"eval/images": shown}, run.state.update, captions)
    write_report(run.folder.path)
    scores = [f"{k} {v:.4f}" for k, v in metrics.items() if k.startswith("eval/")]
    logger.info("epoch %d held-out: %s", run.state.epoch, ", ".join(scores))


def _finish(run: Run) -> dict | None:
    """Write summary and report, and close what was opened."""
    run.rewards.close()
    if not run.is_main:
        return None
    close_trackers(run.trackers)
    summary = run.folder.write_summary(peak_memory_gib=round(peak_memory_gib(), 3))
    write_report(run.folder.path)
    return summary


def peak_memory_gib() -> float:
    """Return this process's peak memory: the GPU's where there is one, else the resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
