"""How many optimizer steps an epoch takes, on what, and that world and batch size change neither.

A "version" is the trained parameters as they are between two optimizer steps.
"""

import json
import subprocess
from pathlib import Path

import dump_updates
import pytest
import torch
import toy
from test_exactness import ENVIRONMENT, ROOT, TWO_RANKS

from flow_grpo import session

# 48 samples of 5 trained steps an epoch, 2 epochs.
CASES = {
    "one": ("grpo", {"train__updates_per_epoch": 1}),
    "four": ("grpo", {"train__updates_per_epoch": 4}),
    "inner": ("grpo", {"train__updates_per_epoch": 2, "train__num_inner_epochs": 3}),
    "chunks": ("grpo", {"train__updates_per_epoch": 1, "train__steps_per_update": 2}),
    "all": ("grpo_guard", {"train__updates_per_epoch": 2, "train__num_inner_epochs": 2,
                           "train__steps_per_update": 3}),
    "some steps": ("grpo", {"train__updates_per_epoch": 1, "train__steps_per_update": 1,
                            "train__timestep_fraction": 0.5}),
    "uneven": ("grpo", {"train__updates_per_epoch": 5, "train__kl_coef": 0.01}),
    "dpo": ("dpo", {"train__updates_per_epoch": 2, "train__draws_per_sample": 3,
                    "train__dpo_beta": 5.0, "train__old_update_freq": 2}),
    "sft": ("sft", {"train__updates_per_epoch": 3, "train__num_inner_epochs": 2}),
    "nft": ("nft", {"train__updates_per_epoch": 2, "train__draws_per_sample": 2}),
}  # fmt: skip
ALL = [0, 1, 2, 3, 4]
# Of one epoch, an entry an optimizer step: [rows, trained steps they are of].
UPDATES = {
    "one": [[240, ALL]],
    "four": [[60, ALL]] * 4,
    "inner": [[120, ALL]] * 6,
    "chunks": [[96, [0, 1]], [96, [2, 3]], [48, [4]]],  # noisy ones first
    "all": [[72, [0, 1, 2]], [48, [3, 4]]] * 4,
    "some steps": [[48, [0]], [48, [1]], [48, [2]]],  # floor(6 * 0.5) places
    "uneven": [[50, ALL]] * 3 + [[45, ALL]] * 2,  # 10, 10, 10, 9 and 9 samples
    "dpo": [[6, [0]]] * 2,  # 4 groups: 2 pairs an update
    "sft": [[2, [0]], [1, [0]], [1, [0]]] * 2,  # 4 best images
    "nft": [[48, [0]]] * 2,
}


@pytest.fixture(scope="module")
def alone() -> dict:
    """Return what one process does in every case, in batches of 48."""
    return {name: dump_updates.count(*case) for name, case in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_an_epoch_takes_exactly_the_updates_it_is_told_to(alone, case):
    found = alone[case]
    taken = [[update["rows"], update["steps"]] for update in found["updates"]]
    assert taken == UPDATES[case] * 2
    assert found["count"] == len(UPDATES[case]) * 2
    # Every update starts from the weights that the one before it made.
    versions = [*found["versions"], found["parameters"]]
    assert len({tuple(version) for version in versions}) == len(versions)


@pytest.mark.parametrize("case", [case for case in CASES if "steps_per_update" in str(CASES[case])])
def test_only_the_first_update_of_an_epoch_is_on_policy(alone, case):
    for metrics in alone[case]["metrics"]:
        assert metrics["train/ratio_dev_first"] == 0.0
        assert metrics["train/ratio_mean"] != 1.0


@pytest.mark.parametrize("case", CASES)
def test_the_learning_rate_counts_the_updates_that_there_are(tmp_path, case):
    algorithm, settings = CASES[case]
    config = toy.config(tmp_path, algorithm, **settings)
    assert session.updates_per_epoch(config) == len(UPDATES[case])
    config.num_epochs = 7
    assert session.total_updates(config) == 7 * len(UPDATES[case])


def test_every_inner_epoch_noises_the_images_anew(tmp_path, monkeypatch):
    run = toy.build(toy.config(tmp_path, "nft", train__num_inner_epochs=3))
    honest, seen = run.algorithm.loss, []

    def loss(policy, batch):
        real = batch.weight > 0
        seen.append((batch.noise.flatten(1)[real], batch.sigma[real]))
        return honest(policy, batch)

    monkeypatch.setattr(run.algorithm, "loss", loss)
    toy.train_epoch(run)
    noises, sigmas = (torch.cat(column) for column in zip(*seen))
    assert len(noises) == 3 * 48
    assert len(noises.unique(dim=0)) == 3 * 48
    assert len(sigmas.unique()) > 2 * 48
    run.rewards.close()


@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("case", ["all", "uneven", "dpo", "nft"])
def test_accumulation_changes_neither_updates_nor_weights(alone, case, batch_size):
    algorithm, settings = CASES[case]
    found = dump_updates.count(algorithm, {**settings, "sample__batch_size": batch_size})
    size = {1: 1, 5: 4, 16: 16}[batch_size]  # the largest divisor of 48
    rows = max(1, size // 2) if algorithm == "dpo" else size
    for update, whole in zip(found["updates"], alone[case]["updates"], strict=True):
        assert (update["rows"], update["steps"]) == (whole["rows"], whole["steps"])
        assert update["forwards"] == -(-update["rows"] // rows)
    assert_equal_up_to_rounding(found, alone[case])


def assert_equal_up_to_rounding(found: dict, expected: dict) -> None:
    """Compare weights of order 0.1 and metrics: float32 sums over rows are in another order.

    Adam divides gradients by their own size, so 1e-6 of one is 1e-6 of a step of 0.05. Adam would
    also hide a wrong factor of all gradients; their norm, a metric, does not.
    """
    assert found["count"] == expected["count"]
    for one, other in zip(
        [*found["versions"], found["parameters"]],
        [*expected["versions"], expected["parameters"]],
        strict=True,
    ):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
        assert one["train/grad_norm"] > 1e-3
    assert max(map(abs, found["parameters"])) > 0.01


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict:
    """Return what each of two processes does in every case, in batches of 6."""
    out = tmp_path_factory.mktemp("updates")
    arguments = {
        name: {"algorithm": algorithm, "settings": {**settings, "sample__batch_size": 6}}
        for name, (algorithm, settings) in CASES.items()
    }
    (out / "cases.json").write_text(json.dumps(arguments))
    command = [*TWO_RANKS, "tests/dump_updates.py", str(out), str(out / "cases.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: [json.loads(Path(out / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        for name in CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_updates_that_one_takes(alone, two_ranks, case):
    ranks, one = two_ranks[case], alone[case]
    assert ranks[0]["versions"] == ranks[1]["versions"]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    for whole, *shares in zip(one["updates"], *(r["updates"] for r in ranks), strict=True):
        assert sum(share["rows"] for share in shares) == whole["rows"]
        assert shares[0]["forwards"] == shares[1]["forwards"]
    assert_equal_up_to_rounding(ranks[0], one)
