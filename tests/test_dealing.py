"""Updates do not depend on the world size, and ranks never differ in what they run."""

import collections
import itertools
import queue
import threading

import pytest
import torch

from flow_grpo import dealing
from flow_grpo.algorithms.base import Rows, all_steps

WORLD_SIZES = (1, 2, 3, 8)


def pairs(rows) -> list[tuple[int, int]]:
    samples, steps = rows.samples[:, 0], rows.columns["step"]
    return list(zip(samples.tolist(), steps.tolist(), strict=True))


def real_pairs(share) -> list[tuple[int, int]]:
    return pairs(share.rows.pick(share.weight > 0))


@pytest.fixture
def rows():
    """Return 3 steps of 13 of 24 samples: what is left where groups taught nothing."""
    samples = torch.tensor([0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 23])
    return all_steps(samples, 3)


def test_updates_share_out_the_samples_whole_and_evenly(rows):
    parts = dealing.cut(rows, 4)
    assert sorted(itertools.chain(*map(pairs, parts))) == sorted(pairs(rows))
    assert [len(part.samples.unique()) for part in parts] == [4, 3, 3, 3]  # 13 samples
    for part in parts:  # all steps of a sample are in one update
        samples, counts = part.samples.unique(return_counts=True)
        assert counts.tolist() == [3] * len(samples)


def test_pairs_go_where_their_first_sample_goes():
    pairs = Rows(torch.tensor([[0, 9], [4, 1], [8, 7]]), {"draw": torch.zeros(3, dtype=int)})
    first, second = dealing.cut(pairs, 2)
    assert first.samples.tolist() == [[0, 9], [8, 7]]
    assert second.samples.tolist() == [[4, 1]]


def test_updates_may_take_a_few_steps_each_the_noisy_ones_first(rows):
    parts = dealing.cut_steps(rows, 3, 2)
    assert [sorted(set(part.columns["step"].tolist())) for part in parts] == [[0, 1], [2]]
    assert sorted(itertools.chain(*map(pairs, parts))) == sorted(pairs(rows))
    assert len(dealing.cut_steps(rows, 3, 1)) == 3
    assert [pairs(part) for part in dealing.cut_steps(rows, 3, 0)] == [pairs(rows)]


def test_there_are_no_empty_updates():
    assert [len(part.samples) for part in dealing.cut(all_steps(torch.arange(2), 3), 5)] == [3, 3]
    assert dealing.cut(all_steps(torch.arange(0), 3), 5) == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_every_row_is_dealt_once_for_any_world_size(rows, world_size, batch_size):
    shares = dealing.shares(rows, world_size, batch_size)
    assert len(shares) == world_size
    assert sorted(itertools.chain(*map(real_pairs, shares))) == sorted(pairs(rows))


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 20])  # 20: some ranks have no sample
@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_every_rank_runs_equally_many_forwards_of_one_shape(rows, world_size, batch_size):
    shares = dealing.shares(rows, world_size, batch_size)
    (length,) = {len(share.weight) for share in shares}
    assert length % batch_size == 0
    assert length > 0
    # No more forwards than the largest share needs: 13 samples of 3 rows.
    assert length // batch_size == -(-(-(-13 // world_size) * 3) // batch_size)


def test_padding_has_weight_zero_and_rows_weight_one(rows):
    shares = dealing.shares(rows, 20, 4)
    assert sum(share.weight.sum().item() for share in shares) == len(rows.samples) == 39
    assert {w for share in shares for w in share.weight.tolist()} == {0.0, 1.0}
    for share in shares:  # padding repeats rows that exist
        assert set(pairs(share.rows)) <= set(pairs(rows))


def test_a_rank_goes_through_its_rows_step_by_step(rows):
    for share in dealing.shares(rows, 2, 4):
        steps = share.rows.pick(share.weight > 0).columns["step"].tolist()
        assert steps == sorted(steps)


class Wire:
    """Carry tensors between threads that stand for ranks, in order for each pair, as gloo does."""

    def __init__(self):
        self.boxes = collections.defaultdict(queue.Queue)
        self.me = threading.local()

    def batch(self, operations) -> list:
        for kind, tensor, other in operations:
            if kind == "send":
                self.boxes[self.me.rank, other].put(tensor.clone())
        for kind, tensor, other in operations:
            if kind == "receive":
                tensor.copy_(self.boxes[other, self.me.rank].get(timeout=10))
        return []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exchange_brings_every_rank_the_samples_it_was_dealt(monkeypatch, world_size):
    per_rank = 12 // world_size
    tensors = {"latents": torch.randn(12, 3, 2), "log_probs": torch.randn(12, 3)}
    samples = torch.tensor([[0, 5], [1, 6], [1, 6], [2, 9], [3, 4], [11, 0]])  # pairs
    rows = Rows(samples, {"draw": torch.tensor([0, 0, 1, 0, 0, 0])})
    shares = dealing.shares(rows, world_size, 4)
    wire, found = Wire(), {}
    monkeypatch.setattr(torch.distributed, "isend", "send")
    monkeypatch.setattr(torch.distributed, "irecv", "receive")
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *operation: operation)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", wire.batch)

    def work(rank):
        wire.me.rank = rank
        own = {k: t[rank * per_rank : (rank + 1) * per_rank] for k, t in tensors.items()}
        found[rank] = dealing.exchange(own, shares, per_rank, rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    for rank, share in enumerate(shares):
        got, samples = found[rank]
        assert samples.tolist() == sorted(set(share.rows.samples.flatten().tolist()))
        for name, tensor in tensors.items():
            assert torch.equal(got[name], tensor[samples]), (rank, name)
    assert all(box.empty() for box in wire.boxes.values())
