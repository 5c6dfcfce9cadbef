"""Queue the calls of one reward to its workers, and end every call within its time limit."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from flow_grpo.rewards._runners import RUNNERS, RewardError, RunnerLost, attempt, describe
from flow_grpo.rewards.base import Samples, Scores, checked, failed

CLOSED = "the reward client was closed"


class Job:
    """One call of one reward; the first to finish it wins."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.done = threading.Event()
        self.ended: float | None = None  # on the monotonic clock
        self._scores: Scores | None = None
        self._lock = threading.Lock()

    def finish(self, answer) -> None:
        """Take a reward's answer, whatever it is."""
        num = len(self.samples.prompts)
        scores, error = attempt(checked, answer, num)
        if error is not None:  # no tensor can be made of it
            scores = failed(num, f"returned malformed Scores: {describe(error)}")
        with self._lock:
            if not self.done.is_set():
                self._scores, self.ended = scores, time.monotonic()
                self.done.set()

    def fail(self, reason: str) -> None:
        """Fail all items."""
        self.finish(failed(len(self.samples.prompts), reason))

    def wait(self) -> Scores:
        """Block until finished; return well-formed scores."""
        self.done.wait()
        return self._scores


class Inline:
    """A reward that the submitting thread calls itself, without a time limit."""

    def __init__(self, reward):
        self._reward = reward

    def start(self, samples: Samples) -> list[Job]:
        """Score at once."""
        job = Job(samples)
        scores, error = attempt(self._reward, samples)
        if error is None:
            job.finish(scores)
        else:
            job.fail(describe(error))
        return [job]

    def wait_until_ready(self) -> None:
        """Return: it is built."""

    def begin_close(self) -> None:
        """Do nothing: there is no worker."""

    def end_close(self, deadline: float) -> None:
        """Do nothing: there is no worker."""


class Pool:
    """The workers of one reward and their queue."""

    def __init__(self, name: str, reward_class: type, device: str, timeout_s: float, num: int):
        # Parts of a call run side by side where that cannot change a score: not a group's
        # statistics, and not the batch of a model on an accelerator.
        self._num_parts = num if reward_class.scope == "sample" and device == "cpu" else 1
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        runner = RUNNERS[reward_class.runs]
        self._workers = [
            _Worker(lambda: runner(name, device), self._queue, self._closed, timeout_s)
            for _ in range(num)
        ]

    def start(self, samples: Samples) -> list[Job]:
        """Queue the samples, in as many contiguous parts as there are workers, and return."""
        jobs = [Job(part) for part in _parts(samples, self._num_parts)]
        for job in jobs:
            self._queue.put(job)
        return jobs

    def wait_until_ready(self) -> None:
        """Block until every worker has built its reward; raise what a constructor raised."""
        for worker in self._workers:
            worker.started.wait()
            if worker.error is not None:
                raise worker.error

    def begin_close(self) -> None:
        """Fail what is queued and tell the workers to end."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):  # workers empty it as well
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job.fail(CLOSED)
        for worker in self._workers:
            self._queue.put(None)
            if worker.runner is not None:
                worker.runner.kill()

    def end_close(self, deadline: float) -> None:
        """Wait for the workers until a time on the monotonic clock, then leave them behind."""
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            if (job := worker.job) is not None:
                job.fail(CLOSED)


class _Worker:
    """A supervising thread with one runner, replaced when it is lost."""

    def __init__(
        self,
        new_runner: Callable,
        jobs: "queue.SimpleQueue[Job | None]",
        closed: threading.Event,
        timeout_s: float,
    ):
        self._new_runner, self._jobs, self._closed = new_runner, jobs, closed
        self._timeout_s = timeout_s
        self.runner = None
        self.job: Job | None = None
        self.started = threading.Event()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="reward-worker", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _, self.error = attempt(self._start_runner)
        if self.error is not None:
            self._drop_runner()
        self.started.set()
        while (job := self._jobs.get()) is not None:
            self.job = job
            self._serve(job)
            self.job = None
        self._drop_runner()

    def _serve(self, job: Job) -> None:
        scores, error = attempt(self._call, job.samples)
        if error is None:
            job.finish(scores)
            return
        if not isinstance(error, RewardError):
            self._drop_runner()
        own_words = isinstance(error, RewardError | RunnerLost)
        reason = str(error) if own_words else describe(error)
        job.fail(CLOSED if self._closed.is_set() else reason)

    def _call(self, samples: Samples) -> Scores:
        if self.runner is None:
            self._start_runner()
        return self.runner.call(samples, self._timeout_s)

    def _start_runner(self) -> None:
        self.runner = self._new_runner()
        if self._closed.is_set():  # close() may have come too early to see this runner
            raise RunnerLost(CLOSED)
        self.runner.wait_until_ready()

    def _drop_runner(self) -> None:
        if self.runner is not None:
            self.runner.stop()
            self.runner = None


def _parts(samples: Samples, num: int) -> list[Samples]:
    total = len(samples.prompts)
    size = max(1, -(-total // num))
    cuts = [slice(start, start + size) for start in range(0, total, size)] or [slice(None)]
    return [Samples(*(None if c is None else c[cut] for c in samples)) for cut in cuts]
