"""Turn an epoch's samples into optimizer steps."""

import logging
import math

import torch
from torch import Tensor

from flow_grpo import dealing, seeds
from flow_grpo.algorithms.base import PER_SAMPLE, RowBatch, Rows, Scores
from flow_grpo.collecting import Collected
from flow_grpo.progress import progress_bar
from flow_grpo.schedules import learning_rate
from flow_grpo.session import Run, total_updates
from flow_grpo.step_statistics import StepStatistics

logger = logging.getLogger(__name__)

NUM_LEVELS = 1000  # noise levels of the schedule that an algorithm may draw from


def update(run: Run, collected: Collected, scores: Scores) -> dict[str, float]:
    """Run the epoch's optimizer steps; return `train/...` metrics, means over the updates."""
    advantages = run.algorithm.advantages(scores)
    parts = _updates(run, collected, scores, advantages)
    before, history = run.state.update, []
    statistics = StepStatistics(len(collected.steps.trained), run.accelerator.device)
    with progress_bar(run.accelerator, "update", len(parts)) as bar:
        for part in parts:
            history.append(
                _update_once(run, collected, advantages, part, statistics, is_first=not history)
            )
            bar.update()
    run.policy.renew_old(run.algorithm.old_decay(before, run.state.update))
    if not history:
        logger.warning("epoch %d: no rewards differ, so there is no update", run.state.epoch)
        return {}
    names = dict.fromkeys(name for entry in history for name in entry)
    metrics = {name: sum(entry[name] for entry in history) / len(history) for name in names}
    if metrics.pop("train/ratio_dev", None) is not None:
        metrics["train/ratio_dev_first"] = history[0]["train/ratio_dev"]
        metrics |= statistics.metrics(run.accelerator, collected.steps.trained)
    return metrics


def _updates(run: Run, collected: Collected, scores: Scores, advantages: Tensor) -> list[Rows]:
    """Return the rows of each optimizer step of the epoch."""
    train, num_steps = run.config.train, len(collected.steps.trained)
    levels = run.model.noise_levels(NUM_LEVELS, run.config.sample.num_steps, run.size)
    generator = seeds.generator(run.config.seed, seeds.ROWS, run.state.epoch)
    updates = []
    for inner in range(train.num_inner_epochs):
        rows = run.algorithm.rows(
            advantages, scores, num_steps=num_steps, sigmas=levels, generator=generator
        )
        if "draw" in rows.columns:  # every pass has noise of its own
            rows.columns["draw"] += inner * train.draws_per_sample
        for part in dealing.cut(rows, train.updates_per_epoch):
            updates += dealing.cut_steps(part, num_steps, train.steps_per_update)
    return updates


def _check_ratio(run, deviation: float) -> None:
    """Stop, before the optimizer, a run whose sampling and training differ."""
    train = run.config.train
    tolerance = min(train.ratio_tolerance, train.clip_range)  # beyond the clip all is lost
    if deviation > tolerance:
        raise ValueError(
            f"|ratio - 1| is {deviation:.3g} in the first update of epoch {run.state.epoch}, where "
            f"it must be 0 up to rounding ({tolerance} at most: train.ratio_tolerance, or the clip "
            "range): sampling and training compute the step differently; weights are unchanged. "
            "Look at the batch size, autocast, attention backend, compilation"
        )


def _update_once(
    run, collected, advantages, rows: Rows, statistics: StepStatistics, *, is_first: bool
) -> dict[str, float]:
    """Take one optimizer step over one update's rows."""
    sums, deviation = _accumulate(run, collected, advantages, rows, statistics, is_first=is_first)
    total = run.accelerator.reduce(torch.stack(list(sums.values())), "sum") / len(rows.samples)
    metrics = dict(zip(sums, total.tolist(), strict=True))
    if not math.isfinite(metrics["loss"]):
        raise FloatingPointError(
            f"the loss is {metrics['loss']} at update {run.state.update} (epoch {run.state.epoch});"
            " weights are unchanged. Look at the rewards and train/ratio_mean of this run; try a "
            "lower learning_rate, or bf16 in place of fp16"
        )
    metrics = {f"train/{'ratio_mean' if k == 'ratio' else k}": v for k, v in metrics.items()}
    if "ratio" in sums:
        metrics["train/ratio_dev"] = run.accelerator.gather(deviation.reshape(1)).max().item()
        if is_first:
            _check_ratio(run, metrics["train/ratio_dev"])
    rate = learning_rate(
        run.state.update,
        peak=run.config.train.learning_rate,
        warmup_updates=run.config.train.lr_warmup_updates,
        total_updates=total_updates(run.config),
        schedule=run.config.train.lr_schedule,
    )
    result = run.policy.step(run.state.update, rate)
    run.state.update += not result.skipped
    return metrics | {
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": rate,
        "train/skipped_steps": float(result.skipped),
    }


def _accumulate(
    run, collected, advantages, rows: Rows, statistics: StepStatistics, *, is_first: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Accumulate one update's gradient; return this rank's sums of metrics, largest |ratio - 1|."""
    rank, plan = run.accelerator.process_index, run.plan
    size = max(1, plan.batch_size // rows.samples.shape[1])  # rows of one forward
    all_shares = dealing.shares(rows, plan.world_size, size)
    tensors, ids = dealing.exchange(collected.tensors, all_shares, plan.samples_per_rank, rank)
    length = len(all_shares[rank].weight)
    sums: dict[str, Tensor] = {}
    deviation = torch.zeros((), device=run.accelerator.device)
    for start in range(0, length, size):
        share = all_shares[rank].part(start, start + size)
        batch = _row_batch(run, collected, tensors, ids, advantages, share)
        with run.policy.accumulate(sync=start + size >= length):
            loss, metrics = run.algorithm.loss(run.policy, batch)
            run.policy.backward(loss * plan.world_size / len(rows.samples))
        if "log_ratio" in metrics and not is_first:  # there it is 0 by construction
            step = share.rows.columns["step"]
            statistics.add(step, batch.advantage, batch.weight, metrics)
        for name, column in metrics.items():
            if name not in ("log_ratio", "clipped"):
                sums[name] = sums.get(name, 0) + (column * batch.weight).sum()
        if "ratio" in metrics:
            off = ((metrics["ratio"] - 1).abs() * (batch.weight > 0)).amax()
            deviation = torch.maximum(deviation, off)
    return sums, deviation


def _row_batch(run, collected, tensors, ids: Tensor, advantages, share) -> RowBatch:
    """Materialise b rows on the device."""
    device, size = run.accelerator.device, run.plan.group_size
    samples, columns = share.rows.samples, share.rows.columns
    flat = samples.T.reshape(-1)  # all first samples, then all second ones
    place, step = torch.searchsorted(ids, flat), columns.get("step")
    kept = {
        name: (tensor[place] if name in PER_SAMPLE else tensor[place, step]).to(device)
        for name, tensor in tensors.items()
    }
    if step is None:
        sigma, sigma_next = columns["sigma"].to(device), None
    else:
        trained = torch.tensor(collected.steps.trained)[step].to(device)
        sigma, sigma_next = collected.sigmas[trained], collected.sigmas[trained + 1]
    return RowBatch(
        cond=run.conditions([collected.prompts[n // size] for n in flat.tolist()]),
        kept=kept,
        advantage=advantages[flat].float().to(device),
        weight=share.weight.to(device),
        columns=columns,
        sigma=sigma,
        sigma_next=sigma_next,
        sigma_max=collected.sigmas[1],
        noise=_forward_noise(run, samples[:, 0], columns["draw"]) if "draw" in columns else None,
        guidance_scale=run.config.sample.guidance_scale if run.model.negative is None else 1.0,
    )


def _forward_noise(run, samples: Tensor, draws: Tensor) -> Tensor:
    """Return noise (b, *latent): a function of (seed, epoch, group, member, draw)."""
    shape, epoch = run.model.latent_shape(run.size), run.state.epoch
    noise = [
        seeds.normal(
            shape, run.config.seed, seeds.FORWARD_NOISE, epoch, *divmod(n, run.plan.group_size), d
        )
        for n, d in zip(samples.tolist(), draws.tolist(), strict=True)
    ]
    return torch.stack(noise).to(run.accelerator.device)
