"""Rewards that do what rewards must not do; loaded by dotted path, in threads and processes."""

import os
import signal
import threading
import time

import torch

from flow_grpo.rewards.base import Scores, State

STARTED = threading.Event()  # set when Gated is called; only in the process of the test
GATE = threading.Event()  # Gated answers once this is set


def good(samples, value=1.0):
    """Return the same value for every sample."""
    num = len(samples.prompts)
    states = torch.zeros(num, dtype=torch.uint8)
    return Scores(torch.full((num,), value), states, [""] * num, {"twice": torch.full((num,), 2.0)})


class Fake:
    """What all fakes share: a prompt names the misdeed, any other prompt is scored 1."""

    scope = "group"  # one call for the whole submission
    runs = "thread"

    def __init__(self, device="cpu"):
        self.device = device

    def __call__(self, samples):
        word = samples.prompts[0]
        if word == "raise":
            raise RuntimeError("no such\nluck")
        if word == "hang":
            time.sleep(3600)
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "nan":
            scores = good(samples)
            scores.values[1:3] = torch.tensor([torch.nan, torch.inf])
            return scores
        if word == "short":
            return Scores(*(column[:-1] for column in good(samples)[:3]), {})
        if word == "list":
            return [1.0] * len(samples.prompts)
        if word == "malformed":
            return Scores("1.0", None, [], {})
        return good(samples, samples.images.mean().item())


class Threaded(Fake):
    """A fake in a thread."""


class Spawned(Fake):
    """A fake in a process."""

    runs = "process"


class Inlined(Fake):
    """A fake in the caller's thread."""

    runs = "inline"


class Whereabouts(Fake):
    """Score the process id and, in the details, whether the main module was imported."""

    runs = "process"

    def __call__(self, samples):
        return good(samples, float(os.getpid()))


class Gated(Fake):
    """Answer only when the test allows it."""

    def __call__(self, samples):
        STARTED.set()
        GATE.wait(60)
        return good(samples)


class PerSample(Fake):
    """Score each sample by its image; items that are told to do so are not applicable."""

    scope = "sample"

    def __call__(self, samples):
        scores = good(samples)
        scores.values.copy_(samples.images.flatten(1).mean(1))
        if "raise" in samples.prompts:
            raise RuntimeError("one of them")
        for i, prompt in enumerate(samples.prompts):
            if prompt == "skip":
                scores.states[i], scores.reasons[i] = State.NOT_APPLICABLE, "asked to skip"
        return scores


class Unbuildable(Fake):
    """Fail to start."""

    def __init__(self, device="cpu"):
        raise ImportError("needs a package: pip install a-package")


class UnbuildableSpawned(Unbuildable):
    """Fail to start in a process."""

    runs = "process"


class Nowhere(Fake):
    """Say nonsense about where to run."""

    runs = "somewhere"
