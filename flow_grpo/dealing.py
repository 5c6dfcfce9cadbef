"""Cut an epoch's rows into updates, deal them to ranks, and bring each rank what it needs.

The cut is a function of the global rows only, so every world size makes the same updates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo.algorithms.base import Rows
from flow_grpo.batching import deal


class Share(NamedTuple):
    """Hold one rank's rows of one update, padded to whole batches; every rank has as many."""

    rows: Rows  # p of them
    weight: Tensor  # (p,) float32, 0 for padding

    def part(self, start: int, stop: int) -> "Share":
        """Return the rows start ... stop - 1."""
        return Share(self.rows.pick(torch.arange(start, stop)), self.weight[start:stop])


def cut(rows: Rows, num_updates: int) -> list[Rows]:
    """Split rows by their first sample into `num_updates` parts of like size, fewer if few.

    Sample number i (of those that have rows) goes to update i mod num_updates: contiguous dealing
    of samples to ranks then leaves nearly all of them where they are.
    """
    samples, place = rows.samples[:, 0].unique(return_inverse=True)
    num_updates = min(num_updates, len(samples))
    return [rows.pick(place % num_updates == update) for update in range(num_updates)]


def cut_steps(rows: Rows, num_steps: int, steps_per_update: int) -> list[Rows]:
    """Split rows into updates of `steps_per_update` trained steps each, noisy first; 0 = one."""
    if not steps_per_update:
        return [rows]
    chunk = rows.columns["step"] // steps_per_update
    parts = [rows.pick(chunk == c) for c in range(-(-num_steps // steps_per_update))]
    return [part for part in parts if len(part.samples)]


def shares(rows: Rows, world_size: int, batch_size: int) -> list[Share]:
    """Deal one update's rows: each rank gets a run of samples, ordered by step or draw, then them.

    All ranks get the same number of rows, a multiple of batch_size: short ones repeat their first
    row (or row 0) with weight 0.
    """
    samples, place = rows.samples[:, 0].unique(return_inverse=True)
    inner = rows.columns.get("step", rows.columns.get("draw"))
    picked = []
    for rank in range(world_size):
        own = deal(len(samples), world_size, rank)
        index = ((place >= own.start) & (place < own.stop)).nonzero().flatten()
        picked.append(index[torch.argsort(inner[index], stable=True)])
    length = -(-max(len(index) for index in picked) // batch_size) * batch_size
    padded = []
    for index in picked:
        filler = index[:1] if len(index) else torch.zeros(1, dtype=torch.int64)
        full = torch.cat([index, filler.expand(length - len(index))])
        weight = torch.zeros(length)
        weight[: len(index)] = 1.0
        padded.append(Share(rows.pick(full), weight))
    return padded


def exchange(
    tensors: dict[str, Tensor], all_shares: list[Share], samples_per_rank: int, rank: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return ({name: (s, ...)}, samples (s,)): what this rank needs, fetched from its owners.

    Args:
        tensors: this rank's own samples, `samples_per_rank` of them, one row each.
        all_shares: every rank's share of the update, the same list on every rank.
        samples_per_rank: sample i lies on rank i // samples_per_rank.
        rank: this process.
    """
    needed = [share.rows.samples.unique() for share in all_shares]
    mine = needed[rank]
    owner = mine // samples_per_rank
    result = {
        name: tensor.new_empty((len(mine), *tensor.shape[1:])) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        local = owner == rank
        result[name][local] = tensor[mine[local] - rank * samples_per_rank]
    operations, arrivals = [], []
    for other in range(len(all_shares)):
        if other == rank:
            continue
        wanted = needed[other][needed[other] // samples_per_rank == rank]
        for name in sorted(tensors):
            if len(wanted):
                sent = tensors[name][wanted - rank * samples_per_rank].contiguous()
                operations.append(torch.distributed.P2POp(torch.distributed.isend, sent, other))
            if (owner == other).any():
                shape = (int((owner == other).sum()), *tensors[name].shape[1:])
                received = tensors[name].new_empty(shape)
                operations.append(torch.distributed.P2POp(torch.distributed.irecv, received, other))
                arrivals.append((name, owner == other, received))
    if operations:
        for request in torch.distributed.batch_isend_irecv(operations):
            request.wait()
    for name, place, received in arrivals:
        result[name][place] = received
    return result, mine
