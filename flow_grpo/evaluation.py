"""Score held-out prompts: average weights, ODE, fixed seeds, every prompt counted once."""

import math

import torch
from torch import Tensor

from flow_grpo import seeds
from flow_grpo.advantages import combine_rewards
from flow_grpo.batching import deal
from flow_grpo.rewards.base import Samples, State
from flow_grpo.rollout import sample_trajectory


def evaluate(run, progress) -> tuple[dict[str, float], dict]:
    """Return (metrics, kept): `eval/<reward>`, its standard error, and the kept samples.

    Args:
        run: the trainer's `Run`.
        progress: called with the number of images done.

    `kept` holds images, prompts, scores and reference images (None where nothing is edited) of this
    rank's first `eval.num_samples` prompts.
    """
    settings, world_size = run.config.eval, run.accelerator.num_processes
    share = deal(len(run.eval_prompts), world_size, run.accelerator.process_index)
    longest = -(-len(run.eval_prompts) // world_size)
    batch_size = min(settings.batch_size, longest)
    sigmas = run.model.sigmas(settings.num_steps, run.size)
    pending, kept = [], []
    with torch.no_grad(), run.policy.weights("ema" if run.policy.ema else "current"):
        for start in range(0, longest, batch_size):
            places = [share.start + i for i in range(start, start + batch_size)]
            real = [place for place in places if place < share.stop]
            padded = real + [0] * (batch_size - len(real))
            images = _images(run, padded, sigmas)[: len(real)]
            kept.append(images[: max(0, settings.num_samples - start)])
            if real:
                samples = Samples(
                    images=images,
                    prompts=[run.eval_prompts[i].prompt for i in real],
                    metadata=[run.eval_prompts[i].metadata for i in real],
                    reference_images=run.reference_images([run.eval_prompts[i] for i in real]),
                    group_ids=None,
                )
                pending.append(run.rewards.submit(samples))
            progress(len(real))
    tables = [result.result() for result in pending]
    values, states = _gather(run, tables, longest, len(run.eval_prompts))
    metrics = summarise(values, states, run.weights, prefix="eval/")
    num_kept = sum(len(images) for images in kept)
    scores = {
        name: [
            value if math.isfinite(value) else None for value in values[name][:num_kept].tolist()
        ]
        for name in values
    }
    prompts = run.eval_prompts[:num_kept]
    return metrics, {
        "images": torch.cat(kept),
        "prompts": [prompt.prompt for prompt in prompts],
        "scores": scores,
        "references": run.reference_images(prompts),
    }


def summarise(
    values: dict[str, Tensor], states: dict[str, Tensor], weights: dict[str, float], *, prefix: str
) -> dict[str, float]:
    """Return each reward's mean over the samples it applies to, its standard error, the total's.

    Args:
        values: reward -> (n,).
        states: reward -> (n,) State.
        weights: reward -> weight in the total.
        prefix: of the metric names.
    """
    total, valid = combine_rewards(values, weights, states)
    columns = {name: values[name][states[name] == State.OK].double() for name in values}
    columns["total"] = total[valid]
    metrics = {}
    for name, column in columns.items():
        if len(column):
            metrics[f"{prefix}{name}"] = column.mean().item()
        if len(column) > 1:
            metrics[f"{prefix}{name}_stderr"] = (column.std() / len(column) ** 0.5).item()
    failed = sum(int((state == State.FAILED).sum()) for state in states.values())
    if failed:
        metrics[f"failed/{prefix.rstrip('/')}"] = failed
    return metrics


def _images(run, places: list[int], sigmas: Tensor) -> Tensor:
    device, shape = run.accelerator.device, run.model.latent_shape(run.size)
    noise = [
        seeds.normal(shape, run.config.seed, seeds.EVAL_NOISE, group=place) for place in places
    ]
    x = run.model.initial_latents(len(places), run.size, torch.stack(noise).to(device))
    cond = run.conditions([run.eval_prompts[place] for place in places])
    guidance_scale = run.config.eval.guidance_scale

    def velocity(x, sigma, *, replay):
        return run.policy.velocity(x, sigma, cond, guidance_scale, replay=replay)

    return run.model.decode(sample_trajectory(velocity, x, sigmas).final).cpu()


def _gather(run, tables, longest: int, num_prompts: int):
    """Return ({reward: (n,)}, {reward: (n,)}) of all prompts, from every rank's share."""
    world_size = run.accelerator.num_processes
    values, states = {}, {}
    for name in run.rewards.weights:
        own = torch.zeros(longest, 2, dtype=torch.float64)  # a rank may have no prompt at all
        for column, field in enumerate(("values", "states")):
            scores = [getattr(table, field)[name].double() for table in tables]
            if scores:
                own[: sum(map(len, scores)), column] = torch.cat(scores)
        gathered = run.accelerator.gather(own.to(run.accelerator.device)).cpu()
        gathered = gathered.view(world_size, longest, 2)
        shares = [deal(num_prompts, world_size, rank) for rank in range(world_size)]
        whole = torch.cat([gathered[rank, : len(share)] for rank, share in enumerate(shares)])
        values[name], states[name] = whole[:, 0], whole[:, 1].to(torch.uint8)
    return values, states
