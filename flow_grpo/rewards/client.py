"""Score samples beside the training loop: asynchronous, bounded in time, and never fatal."""

import logging
import math
import time
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import registry
from flow_grpo.rewards._pool import Inline, Job, Pool
from flow_grpo.rewards._runners import RUNNERS
from flow_grpo.rewards.base import Samples, Scores, State

PACKAGE = "flow_grpo.rewards"
GRACE_S = 5.0  # how long close() waits for calls in progress; a thread cannot be killed
MAX_WARNINGS = 20  # distinct reasons logged for one reward
logger = logging.getLogger(__name__)


class ScoreTable(NamedTuple):
    """All scores of one submission; reward name -> column of n items."""

    values: dict[str, Tensor]  # float32, NaN where the state is not OK
    states: dict[str, Tensor]  # uint8, of base.State
    reasons: dict[str, list[str]]
    details: dict[str, dict[str, Tensor]]


class RewardClient:
    """Run every named reward, each where its class says: inline, in threads or in processes.

    Names are files of `flow_grpo/rewards` or dotted paths `package.module:Class`; scores are keyed
    by `registry.metric_name`. Two workers of a reward score two calls, or the halves of one, at a
    time; every worker holds its own instance. A reward that raises, hangs for more than timeout_s,
    dies or answers nonsense gives FAILED items with the reason, logged once. Rewards that run
    inline have no time limit. Constructor errors of rewards are raised here.
    """

    def __init__(
        self,
        weights: dict[str, float],
        *,
        device: str = "cpu",
        timeout_s: float = 120.0,
        num_workers: int = 2,
    ):
        _check(weights, timeout_s, num_workers)
        classes = {name: registry.load(PACKAGE, name) for name in weights}
        for name, reward_class in classes.items():
            _check_class(name, reward_class)
        self.weights = {registry.metric_name(name): float(w) for name, w in weights.items()}
        self._lanes: dict[str, Inline | Pool] = {}
        self._warned: dict[str, set[str]] = {name: set() for name in self.weights}
        self._close = weakref.finalize(self, _close_all, self._lanes)  # also at interpreter exit
        try:
            for name, reward_class in classes.items():
                if reward_class.runs == "inline":
                    lane = Inline(reward_class(device=device))
                else:
                    lane = Pool(name, reward_class, device, timeout_s, num_workers)
                self._lanes[registry.metric_name(name)] = lane
            for lane in self._lanes.values():
                lane.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def submit(self, samples: Samples, *, names: tuple[str, ...] | None = None) -> "Pending":
        """Start scoring and return at once; `names` picks some of the rewards.

        The images must not be changed until the result is there.
        """
        if not self._close.alive:
            raise ValueError("the reward client is closed; make a new one")
        images = samples.images.detach().to("cpu", torch.float32)
        num = len(samples.prompts)
        if len(images) != num or len(samples.metadata) != num:
            raise ValueError(
                f"{len(images)} images, {num} prompts and {len(samples.metadata)} metadata; "
                "one of each is needed for every sample"
            )
        samples = samples._replace(images=images)
        names = tuple(self._lanes) if names is None else names
        jobs = {name: self._lanes[name].start(samples) for name in names}
        return Pending(jobs, self._warn)

    def close(self) -> None:
        """End all workers; what is not scored by then fails. Never waits for a reward that hangs.

        Calls in progress get up to GRACE_S seconds, processes none.
        """
        self._close()

    def __enter__(self) -> "RewardClient":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def _warn(self, name: str, scores: Scores) -> None:
        failures = [
            reason
            for reason, state in zip(scores.reasons, scores.states.tolist(), strict=True)
            if state == State.FAILED
        ]
        seen = self._warned[name]
        for reason in dict.fromkeys(failures):
            if reason in seen or len(seen) >= MAX_WARNINGS:
                continue
            seen.add(reason)
            count = f"{failures.count(reason)} of {len(scores.reasons)}"
            logger.warning("reward %s failed for %s samples: %s", name, count, reason)


class Pending:
    """Scores on their way."""

    def __init__(self, jobs: dict[str, list[Job]], warn):
        self._jobs, self._warn = jobs, warn
        self._submitted = time.monotonic()
        self._table: ScoreTable | None = None

    def done(self) -> bool:
        """Say whether result() would return at once."""
        return all(job.done.is_set() for jobs in self._jobs.values() for job in jobs)

    @property
    def seconds(self) -> float:
        """Seconds from the submission until the last score was there, or until now."""
        ends = [job.ended for jobs in self._jobs.values() for job in jobs]
        now = time.monotonic()
        return max((now if end is None else end for end in ends), default=now) - self._submitted

    def result(self) -> ScoreTable:
        """Wait for all rewards and return their scores; the time limits bound the wait."""
        if self._table is None:
            table = ScoreTable({}, {}, {}, {})
            for name, jobs in self._jobs.items():
                scores = _joined([job.wait() for job in jobs])
                self._warn(name, scores)
                for column, value in zip(table, scores, strict=True):
                    column[name] = value
            self._table = table
        return self._table


def _close_all(lanes: dict[str, Inline | Pool]) -> None:
    deadline = time.monotonic() + GRACE_S
    for lane in lanes.values():
        lane.begin_close()
    for lane in lanes.values():
        lane.end_close(deadline)


def _joined(parts: list[Scores]) -> Scores:
    """Join the scores of consecutive parts; a detail that a part lacks is NaN there."""
    if len(parts) == 1:
        return parts[0]
    keys = dict.fromkeys(key for part in parts for key in part.details)
    blank = [torch.full_like(part.values, torch.nan) for part in parts]
    pairs = list(zip(parts, blank, strict=True))
    return Scores(
        torch.cat([part.values for part in parts]),
        torch.cat([part.states for part in parts]),
        [reason for part in parts for reason in part.reasons],
        {key: torch.cat([part.details.get(key, nan) for part, nan in pairs]) for key in keys},
    )


def _check(weights: dict[str, float], timeout_s: float, num_workers: int) -> None:
    if not weights:
        raise ValueError("no reward is named; e.g. reward_fn = {'ocr': 1.0}")
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"the weight of reward {name!r} is {weight}; it must be finite")
    metrics = [registry.metric_name(name) for name in weights]
    if twice := {metric for metric in metrics if metrics.count(metric) > 1}:
        raise ValueError(
            f"rewards {list(weights)} share the name {sorted(twice)} in the logs; rename a file"
        )
    if timeout_s <= 0 or num_workers < 1:
        raise ValueError(
            f"timeout_s ({timeout_s}) must be above 0 and num_workers ({num_workers}) at least 1"
        )


def _check_class(name: str, reward_class: type) -> None:
    allowed = {"scope": ("sample", "group"), "runs": ("inline", *RUNNERS)}
    for key, values in allowed.items():
        if (value := getattr(reward_class, key, None)) not in values:
            raise ValueError(f"reward {name!r} has {key} = {value!r}; it must be one of {values}")
