"""Random numbers as functions of (seed, stream, epoch, group, member, t), never of rank or order.

Every use of randomness has a stream id, so that adding one leaves the numbers of the others alone.
"""

import numpy as np
import torch
from torch import Tensor

# Stream ids are part of a run's identity: append new ones, never renumber.
PROMPTS, INITIAL_NOISE, STEP_NOISE, WINDOW, EVAL_NOISE, ROWS, ADAPTER_INIT, PERMUTE = range(8)
TRAINED_STEPS, FORWARD_NOISE = 8, 9


def generator(
    seed: int, stream: int, epoch: int = 0, group: int = 0, member: int = 0, t: int = 0
) -> torch.Generator:
    """Return a CPU generator that depends on its arguments only.

    Each argument is in [0, 2**32), which makes the entropy six words whatever the values.
    Raises ValueError outside that range.
    """
    words = {"seed": seed, "stream": stream, "epoch": epoch, "group": group, "member": member,
             "t": t}  # fmt: skip
    for name, word in words.items():
        if not 0 <= word < 2**32:
            nearest = min(max(word, 0), 2**32 - 1)
            raise ValueError(
                f"{name} ({word}) is outside [0, 2**32); the nearest valid {name} is {nearest}"
            )
    # SeedSequence's hash is frozen by numpy's policy. torch's CPU engine takes 32 bits of seed.
    state = np.random.SeedSequence([int(word) for word in words.values()]).generate_state(1)
    return torch.Generator(device="cpu").manual_seed(int(state[0]))


def normal(
    shape: tuple[int, ...],
    seed: int,
    stream: int,
    epoch: int = 0,
    group: int = 0,
    member: int = 0,
    t: int = 0,
) -> Tensor:
    """Draw standard normal numbers of a shape: float32, on the CPU."""
    source = generator(seed, stream, epoch, group, member, t)
    return torch.randn(tuple(shape), generator=source, dtype=torch.float32, device="cpu")


def permutation(num: int, seed: int, stream: int, epoch: int = 0) -> Tensor:
    """Draw a permutation of 0 .. num - 1: int64, (num,), on the CPU."""
    return torch.randperm(num, generator=generator(seed, stream, epoch), device="cpu")
