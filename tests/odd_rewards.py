"""Rewards with known behaviour, named by dotted path: odd_rewards:Contrast and so on."""

import time

import torch

from flow_grpo.rewards.base import Samples, Scores, State


def scores(values: torch.Tensor) -> Scores:
    """Return values (n,) as scores that are all OK."""
    num = len(values)
    return Scores(values, torch.zeros(num, dtype=torch.uint8), [""] * num, {})


class _Reward:
    scope, runs, media = "sample", "thread", ("image", "video")

    def __init__(self, device: str = "cpu"):
        self.device = device


class Contrast(_Reward):
    """A float of every pixel, so that images which differ in one bit differ in reward."""

    def __call__(self, samples: Samples) -> Scores:
        return scores(100 * samples.images.flatten(1).double().std(1).float())


class FirstGroup(Contrast):
    """`Contrast` for an epoch's first group; 0, hence no advantage, for the others."""

    def __call__(self, samples: Samples) -> Scores:
        values = super().__call__(samples).values
        return scores(values if samples.group_ids is None else values * (samples.group_ids == 0))


class WholeGroups(Contrast):
    """Says that it compares the members of whole groups."""

    scope = "group"


class NanForSome(Contrast):
    """NaN for the first image of every call."""

    def __call__(self, samples: Samples) -> Scores:
        values = super().__call__(samples).values
        values[0] = torch.nan
        return scores(values)


class NanForAll(_Reward):
    def __call__(self, samples: Samples) -> Scores:
        return scores(torch.full((len(samples.prompts),), torch.nan))


class Raises(_Reward):
    def __call__(self, samples: Samples) -> Scores:
        raise RuntimeError("the scorer lost its weights")


class Hangs(_Reward):
    def __call__(self, samples: Samples) -> Scores:
        time.sleep(60)
        raise AssertionError("nobody waits for this")


class Slow(Contrast):
    """`Contrast`, half a second a call: there is time to interrupt an epoch."""

    def __call__(self, samples: Samples) -> Scores:
        time.sleep(0.5)
        return super().__call__(samples)


class Quoted(Contrast):
    """`Contrast`, for prompts with a quotation only."""

    @staticmethod
    def check_prompts(prompts: list[str]) -> list[bool]:
        return ['"' in prompt for prompt in prompts]

    def __call__(self, samples: Samples) -> Scores:
        found = super().__call__(samples)
        applies = torch.tensor(self.check_prompts(samples.prompts))
        found.values[~applies] = torch.nan
        found.states[~applies] = State.NOT_APPLICABLE
        return found
