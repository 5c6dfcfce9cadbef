"""Sample an epoch's images and gather their scores."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import evaluation, seeds
from flow_grpo.advantages import combine_rewards, zero_std_groups
from flow_grpo.algorithms.base import KEPT, Scores
from flow_grpo.data import Prompt, epoch_prompt_indices
from flow_grpo.epoch_steps import EpochSteps, epoch_steps
from flow_grpo.rewards.base import Samples, State
from flow_grpo.rollout import Trajectory, sample_trajectory
from flow_grpo.sde import SDES
from flow_grpo.session import Run


class Collected(NamedTuple):
    """One rank's samples of an epoch: what the algorithm keeps, one row a sample."""

    tensors: dict[str, Tensor]  # fields of rollout.Trajectory
    sigmas: Tensor  # (T+1,)
    steps: EpochSteps
    prompts: list[Prompt]  # of the epoch's groups
    pending: list  # reward results to come, one a rollout batch


class Rollout(NamedTuple):
    """What all rollout batches of an epoch have in common."""

    run: Run
    epoch: int
    prompts: list[Prompt]  # of the epoch's groups
    sigmas: Tensor  # (T+1,) on the device
    steps: EpochSteps

    def velocity(self, numbers):
        """Return velocity(x, sigma, **how) under the conditions of samples `numbers`."""
        run = self.run
        cond = run.conditions([self.prompts[n // run.plan.group_size] for n in numbers])
        scale = run.config.sample.guidance_scale

        return lambda x, sigma, **how: run.policy.velocity(x, sigma, cond, scale, **how)

    def first_of(self, number: int) -> int:
        """Return the first sample that shares the initial noise of sample `number`."""
        group, member = divmod(number, self.run.plan.group_size)
        return group * self.run.plan.group_size + member // self.steps.sharing * self.steps.sharing

    def initial(self, numbers) -> Tensor:
        """Return x at sigma 1 of samples `numbers`, from (seed, epoch, group, member) alone."""
        run = self.run
        shape, size = run.model.latent_shape(run.size), run.plan.group_size
        places = [divmod(self.first_of(n), size) for n in numbers]
        noise = torch.stack(
            [
                seeds.normal(shape, run.config.seed, seeds.INITIAL_NOISE, self.epoch, *place)
                for place in places
            ]
        )
        return run.model.initial_latents(len(places), run.size, self._sent(noise))

    def step_noises(self, numbers) -> Tensor | None:
        """Return (b, stochastic steps, *latent): functions of (seed, epoch, group, member, t)."""
        run = self.run
        if not self.steps.stochastic:
            return None
        shape, seed = run.model.latent_shape(run.size), run.config.seed
        places = [divmod(n, run.plan.group_size) for n in numbers]
        noises = [
            seeds.normal(shape, seed, seeds.STEP_NOISE, self.epoch, *place, t)
            for place in places
            for t in self.steps.stochastic
        ]
        return self._sent(torch.stack(noises).unflatten(0, (len(places), -1)))

    def prefixes(self, numbers: range) -> dict[int, Tensor]:
        """Run the steps before the window once for all samples that share their initial noise.

        Returns:
            {first sample that shares it: x (*latent)}.
        """
        size, num = self.run.plan.batch_size, self.run.plan.samples_per_rank
        firsts = list(dict.fromkeys(self.first_of(n) for n in numbers))
        # Where the weights are divided over the ranks, all of them must run as many forwards.
        most = max(
            len({self.first_of(n) for n in range(start, start + num)})
            for start in range(0, self.run.plan.samples_per_epoch, num)
        )
        found = {}
        for start in range(0, most, size):
            part = firsts[start : start + size]
            padded = part + firsts[:1] * (size - len(part))  # one batch shape, as everywhere
            x = sample_trajectory(
                self.velocity(padded),
                self.initial(padded),
                self.sigmas,
                solver=self.run.config.sample.ode_solver,
                last=self.steps.prefix,
            ).final
            found |= dict(zip(part, x, strict=False))
        return found

    def trajectory(self, numbers: range, prefixes: dict[int, Tensor]) -> Trajectory:
        """Sample one forward batch, from the branching points if there are some."""
        config, keeps = self.run.config, self.run.algorithm.keeps
        if prefixes:
            x = torch.stack([prefixes[self.first_of(n)] for n in numbers])
        else:
            x = self.initial(numbers)
        velocity = self.velocity(numbers)
        keeps_reference = "reference_velocity" in keeps
        return sample_trajectory(
            velocity,
            x,
            self.sigmas,
            sde=SDES[config.sample.sde_type],
            noise_level=config.sample.noise_level,
            stochastic=self.steps.stochastic,
            trained=self.steps.trained,
            noises=self.step_noises(numbers),
            reference_velocity=partial(velocity, weights="reference") if keeps_reference else None,
            keep_means="old_mean" in keeps,
            solver=config.sample.ode_solver,
            first=self.steps.prefix,
        )

    def _sent(self, noise: Tensor) -> Tensor:
        device = self.run.accelerator.device
        noise = noise.pin_memory() if device.type == "cuda" else noise
        return noise.to(device, non_blocking=True)


def collect(run: Run, epoch: int, bar) -> Collected:
    """Sample this rank's share of an epoch and hand every batch to the rewards at once."""
    config, plan = run.config, run.plan
    indices = epoch_prompt_indices(
        len(run.prompts), plan.groups_per_epoch, seed=config.seed, epoch=epoch
    )
    chosen = [run.prompts[i] for i in indices]
    steps = epoch_steps(config, epoch, trains_steps="window" in run.algorithm.keeps)
    sigmas = run.model.sigmas(config.sample.num_steps, run.size).to(run.accelerator.device)
    rollout = Rollout(run, epoch, chosen, sigmas, steps)
    fields = [field for name in sorted(run.algorithm.keeps) for field in KEPT[name]]
    kept, pending = [], []
    first = run.accelerator.process_index * plan.samples_per_rank
    numbers = range(first, first + plan.samples_per_rank)
    with torch.no_grad(), run.policy.weights(run.algorithm.rollout_weights):
        prefixes = rollout.prefixes(numbers) if steps.prefix else {}
        for start in range(0, len(numbers), plan.batch_size):
            batch = numbers[start : start + plan.batch_size]
            trajectory = rollout.trajectory(batch, prefixes)
            kept.append({field: getattr(trajectory, field) for field in fields})
            groups = [n // plan.group_size for n in batch]
            samples = Samples(
                images=run.model.decode(trajectory.final).cpu(),
                prompts=[chosen[group].prompt for group in groups],
                metadata=[chosen[group].metadata for group in groups],
                reference_images=run.reference_images([chosen[group] for group in groups]),
                group_ids=torch.tensor(groups),
            )
            pending.append(run.rewards.submit(samples, names=tuple(run.weights)))
            bar.update(len(batch))
            if not bar.disable:
                bar.set_postfix_str(_running_reward(run, pending))
    return Collected(
        tensors={field: torch.cat([part[field] for part in kept]) for field in fields},
        sigmas=sigmas,
        steps=steps,
        prompts=rollout.prompts,
        pending=pending,
    )


def _running_reward(run: Run, pending: list) -> str:
    """Return this rank's mean reward over the batches that are scored by now."""
    tables = [result.result() for result in pending if result.done()]
    totals = [combine_rewards(t.values, run.weights, t.states) for t in tables]
    scored = torch.cat([total[valid] for total, valid in totals]) if totals else torch.zeros(0)
    return f"reward {scored.mean():.3f}" if len(scored) else "reward ..."


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
    if not _usable(run, states, valid):
        reasons = {reason for t in tables for each in t.reasons.values() for reason in each}
        raise ValueError(
            f"no sample of epoch {run.state.epoch} has a reward; reasons: "
            f"{'; '.join(sorted(reasons - {''})[:3]) or 'see the other ranks'}"
        )
    group_ids = torch.arange(len(total)) // run.plan.group_size
    weights = {name: torch.full_like(total, weight) for name, weight in run.weights.items()}
    metrics = evaluation.summarise(values, states, run.weights, prefix="reward/")
    metrics = {name: value for name, value in metrics.items() if not name.endswith("_stderr")}
    if valid.any():
        metrics["reward/std"] = total[valid].std(correction=0).item()
    metrics["group/zero_std_fraction"] = zero_std_groups(total, group_ids, valid)
    scores = Scores(values, weights, states, total, valid, group_ids)
    return _controlled(run, scores), metrics


def _usable(run: Run, states: dict[str, Tensor], valid: Tensor) -> bool:
    """Say whether any sample can be learnt from; GDPO needs no more than one of its rewards."""
    if run.config.train.adv_type == "gdpo":
        return any(bool((states[name] == State.OK).any()) for name in run.weights)
    return bool(valid.any())


def _controlled(run: Run, scores: Scores) -> Scores:
    """Return what the algorithm is told: in runs that must not learn, something else."""
    if run.config.control == "permute_rewards":
        order = seeds.permutation(
            len(scores.total), run.config.seed, seeds.PERMUTE, run.state.epoch
        )
        return scores._replace(
            values={name: column[order] for name, column in scores.values.items()},
            states={name: column[order] for name, column in scores.states.items()},
            total=scores.total[order],
            valid=scores.valid[order],
        )
    if run.config.control == "flip_advantages":
        return scores._replace(
            values={name: -column for name, column in scores.values.items()}, total=-scores.total
        )
    return scores
