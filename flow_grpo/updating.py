"""Turn an epoch's samples into optimizer steps."""

import logging
import math

import torch
from torch import Tensor

from flow_grpo import dealing, seeds
from flow_grpo.algorithms.base import RowBatch, Scores
from flow_grpo.collecting import Collected
from flow_grpo.progress import progress_bar
from flow_grpo.schedules import learning_rate
from flow_grpo.session import Run, total_updates

logger = logging.getLogger(__name__)


def update(run: Run, collected: Collected, scores: Scores) -> dict[str, float]:
    """Run the epoch's optimizer steps; return `train/...` metrics, means over the updates."""
    advantages = run.algorithm.advantages(scores)
    if run.config.control == "flip_advantages":
        advantages = -advantages
    rows = run.algorithm.rows(
        advantages,
        scores,
        num_steps=len(collected.trained),
        generator=seeds.generator(run.config.seed, seeds.ROWS, run.state.epoch),
    )
    history = []
    parts = dealing.cut(rows, run.config.train.updates_per_epoch)
    passes = run.config.train.num_inner_epochs
    with progress_bar(run.accelerator, "update", len(parts) * passes) as bar:
        for part in parts * passes:
            shares = dealing.shares(part, run.plan.world_size, run.plan.batch_size)
            history.append(
                _update_once(
                    run, collected, advantages, shares, len(part.sample), is_first=not history
                )
            )
            bar.update()
    if not history:
        logger.warning("epoch %d: every group has equal rewards, no update", run.state.epoch)
        return {}
    names = dict.fromkeys(name for entry in history for name in entry)
    metrics = {name: sum(entry[name] for entry in history) / len(history) for name in names}
    del metrics["train/ratio_dev"]
    metrics["train/ratio_dev_first"] = history[0]["train/ratio_dev"]
    return metrics


def _check_ratio(run, deviation: float) -> None:
    """Stop, before the optimizer, a run whose sampling and training differ."""
    tolerance = run.config.train.ratio_tolerance
    if deviation > tolerance:
        raise ValueError(
            f"|ratio - 1| is {deviation:.3g} in the first update of epoch {run.state.epoch}, where "
            f"it must be 0 up to rounding (train.ratio_tolerance = {tolerance}): sampling and "
            "training compute the step differently; weights are unchanged. Look at the batch "
            "size, autocast, attention backend, compilation"
        )


def _update_once(
    run, collected, advantages, all_shares, num_rows: int, *, is_first: bool
) -> dict[str, float]:
    """Take one optimizer step over one update's rows."""
    rank, device, size = run.accelerator.process_index, run.accelerator.device, run.plan.batch_size
    tensors, ids = dealing.exchange(collected.tensors, all_shares, run.plan.samples_per_rank, rank)
    share = all_shares[rank]
    sums: dict[str, Tensor] = {}
    deviation = torch.zeros((), device=device)
    for start in range(0, len(share.sample), size):
        part = dealing.Share(*(column[start : start + size] for column in share))
        batch = _row_batch(run, collected, tensors, ids, advantages, part)
        with run.policy.accumulate(sync=start + size >= len(share.sample)):
            loss, metrics = run.algorithm.loss(run.policy, batch)
            run.accelerator.backward(loss * run.plan.world_size / num_rows)
        for name, column in metrics.items():
            sums[name] = sums.get(name, 0) + (column * batch.weight).sum()
        if "ratio" in metrics:
            off = ((metrics["ratio"] - 1).abs() * (batch.weight > 0)).amax()
            deviation = torch.maximum(deviation, off)
    total = run.accelerator.reduce(torch.stack(list(sums.values())), "sum") / num_rows
    metrics = dict(zip(sums, total.tolist(), strict=True))
    if not math.isfinite(metrics["loss"]):
        raise FloatingPointError(
            f"the loss is {metrics['loss']} at update {run.state.update} (epoch {run.state.epoch});"
            " weights are unchanged. Look at the rewards and train/ratio_mean of this run; try a "
            "lower learning_rate, or bf16 in place of fp16"
        )
    deviation = run.accelerator.gather(deviation.reshape(1)).max().item()
    if is_first:
        _check_ratio(run, deviation)
    rate = learning_rate(
        run.state.update,
        peak=run.config.train.learning_rate,
        warmup_updates=run.config.train.lr_warmup_updates,
        total_updates=total_updates(run.config),
        schedule=run.config.train.lr_schedule,
    )
    result = run.policy.step(run.state.update, rate)
    run.state.update += not result.skipped
    renamed = {f"train/{'ratio_mean' if k == 'ratio' else k}": v for k, v in metrics.items()}
    return renamed | {
        "train/ratio_dev": deviation,
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": rate,
        "train/skipped_steps": float(result.skipped),
    }


def _row_batch(run, collected, tensors, ids: Tensor, advantages, share) -> RowBatch:
    """Materialise b rows on the device."""
    device = run.accelerator.device
    place, step = torch.searchsorted(ids, share.sample), share.step
    trained = torch.tensor(collected.trained)[step]
    picked = {name: tensor[place, step].to(device) for name, tensor in tensors.items()}
    groups = (share.sample // run.plan.group_size).tolist()
    return RowBatch(
        x=picked["latents"],
        x_next=picked["next_latents"],
        sigma=collected.sigmas[trained.to(device)],
        sigma_next=collected.sigmas[trained.to(device) + 1],
        sigma_max=collected.sigmas[1],
        cond=run.prompt_cache([collected.prompts[group] for group in groups], device),
        old_log_prob=picked["log_probs"],
        advantage=advantages[share.sample].float().to(device),
        weight=share.weight.to(device),
        reference_velocity=picked.get("reference_velocity"),
    )
