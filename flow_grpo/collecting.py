"""Sample an epoch's images and gather their scores."""

from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import evaluation, seeds
from flow_grpo.advantages import combine_rewards, zero_std_groups
from flow_grpo.algorithms.base import Scores
from flow_grpo.data import epoch_prompt_indices
from flow_grpo.rewards.base import Samples
from flow_grpo.rollout import sample_trajectory
from flow_grpo.schedules import sde_window
from flow_grpo.sde import SDES
from flow_grpo.session import Run


class Collected(NamedTuple):
    """One rank's samples of an epoch: what the algorithm keeps, one row a sample."""

    tensors: dict[str, Tensor]  # latents, next_latents, log_probs, reference_velocity
    sigmas: Tensor  # (T+1,)
    trained: tuple[int, ...]
    prompts: list[str]  # of the epoch's groups
    pending: list  # reward results to come, one a rollout batch


def collect(run: Run, epoch: int, bar) -> Collected:
    """Sample this rank's share of an epoch and hand every batch to the rewards at once."""
    config, plan, device = run.config, run.plan, run.accelerator.device
    indices = epoch_prompt_indices(
        len(run.prompts), plan.groups_per_epoch, seed=config.seed, epoch=epoch
    )
    window = sde_window(
        config.sample.num_steps,
        config.sample.sde_window_size,
        tuple(config.sample.sde_window_range),
        generator=seeds.generator(config.seed, seeds.WINDOW, epoch),
    )
    sigmas = run.model.sigmas(config.sample.num_steps, run.size)
    kept, pending = [], []
    first = run.accelerator.process_index * plan.samples_per_rank
    for start in range(first, first + plan.samples_per_rank, plan.batch_size):
        numbers = range(start, start + plan.batch_size)
        chosen = [run.prompts[indices[n // plan.group_size]] for n in numbers]
        trajectory = _rollout(run, epoch, numbers, [c.prompt for c in chosen], sigmas, window)
        kept.append(
            {
                name: tensor
                for name in ("latents", "next_latents", "log_probs", "reference_velocity")
                if (tensor := getattr(trajectory, name)) is not None
            }
        )
        images = run.model.decode(trajectory.final).cpu()
        batch = Samples(
            images=images,
            prompts=[c.prompt for c in chosen],
            metadata=[c.metadata for c in chosen],
            reference_images=None,
            group_ids=torch.tensor([n // plan.group_size for n in numbers]),
        )
        pending.append(run.rewards.submit(batch, names=tuple(run.weights)))
        bar.update(len(numbers))
        if not bar.disable:
            bar.set_postfix_str(_running_reward(run, pending))
    return Collected(
        tensors={name: torch.cat([part[name] for part in kept]) for name in kept[0]},
        sigmas=sigmas.to(device),
        trained=window,
        prompts=[run.prompts[i].prompt for i in indices],
        pending=pending,
    )


def _running_reward(run: Run, pending: list) -> str:
    """Return this rank's mean reward over the batches that are scored by now."""
    tables = [result.result() for result in pending if result.done()]
    totals = [combine_rewards(t.values, run.weights, t.states) for t in tables]
    scored = torch.cat([total[valid] for total, valid in totals]) if totals else torch.zeros(0)
    return f"reward {scored.mean():.3f}" if len(scored) else "reward ..."


@torch.no_grad()
def _rollout(run, epoch: int, numbers: range, prompts: list[str], sigmas, window):
    """Sample one forward batch; its noise is a function of (seed, epoch, group, member, t)."""
    config, plan, device = run.config, run.plan, run.accelerator.device
    shape, seed = run.model.latent_shape(run.size), config.seed
    places = [divmod(n, plan.group_size) for n in numbers]
    initial, steps = [], []
    for group, member in places:
        own = 0 if config.sample.same_latent else member
        initial.append(seeds.normal(shape, seed, seeds.INITIAL_NOISE, epoch, group, own))
        steps.append(
            torch.stack(
                [
                    seeds.normal(shape, seed, seeds.STEP_NOISE, epoch, group, member, t)
                    for t in window
                ]
            )
        )
    noise, noises = torch.stack(initial), torch.stack(steps)
    if device.type == "cuda":
        noise, noises = noise.pin_memory(), noises.pin_memory()
    x = run.model.initial_latents(len(numbers), run.size, noise.to(device, non_blocking=True))
    cond = run.prompt_cache(prompts, device)
    scale = config.sample.guidance_scale

    def velocity(x, sigma, *, replay):
        return run.policy.velocity(x, sigma, cond, scale, replay=replay)

    def reference_velocity(x, sigma):
        return run.policy.velocity(x, sigma, cond, scale, weights="reference")

    keeps_reference = "reference_velocity" in run.algorithm.keeps
    return sample_trajectory(
        velocity,
        x,
        sigmas.to(device),
        sde=SDES[config.sample.sde_type],
        noise_level=config.sample.noise_level,
        stochastic=window,
        trained=window,
        noises=noises.to(device, non_blocking=True),
        reference_velocity=reference_velocity if keeps_reference else None,
    )


def score(run: Run, collected: Collected) -> tuple[Scores, dict[str, float]]:
    """Wait for the rewards and gather them from all ranks, in sample order."""
    tables = [pending.result() for pending in collected.pending]
    values, states = {}, {}
    for name in run.weights:
        own = torch.stack(
            [
                torch.cat([table.values[name].double() for table in tables]),
                torch.cat([table.states[name].double() for table in tables]),
            ],
            dim=1,
        )
        gathered = run.accelerator.gather(own.to(run.accelerator.device)).cpu()
        values[name], states[name] = gathered[:, 0], gathered[:, 1].to(torch.uint8)
    total, valid = combine_rewards(values, run.weights, states)
    if not valid.any():
        reasons = {reason for t in tables for each in t.reasons.values() for reason in each}
        raise ValueError(
            f"no sample of epoch {run.state.epoch} has a reward; reasons: "
            f"{'; '.join(sorted(reasons - {''})[:3]) or 'see the other ranks'}"
        )
    if run.config.control == "permute_rewards":
        order = seeds.permutation(len(total), run.config.seed, seeds.PERMUTE, run.state.epoch)
        total, valid = total[order], valid[order]
        values = {name: column[order] for name, column in values.items()}
        states = {name: column[order] for name, column in states.items()}
    group_ids = torch.arange(len(total)) // run.plan.group_size
    metrics = evaluation.summarise(values, states, run.weights, prefix="reward/")
    metrics = {name: value for name, value in metrics.items() if not name.endswith("_stderr")}
    metrics["reward/std"] = total[valid].std(correction=0).item()
    metrics["group/zero_std_fraction"] = zero_std_groups(total, group_ids, valid)
    return Scores(values, run.weights, states, total, valid, group_ids), metrics
