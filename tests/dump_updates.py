"""Run some epochs of toy configurations and save what they updated, for test_updates.py.

    python tests/dump_updates.py OUT CASES.json
    torchrun --nproc_per_node 2 tests/dump_updates.py OUT CASES.json

CASES.json holds {case: {"algorithm": name, "settings": {name: value}}} of `toy.config`. Each rank
writes OUT/<case>-<rank>.json: its updates as `Counted` sees them, and its last parameters.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import toy
from accelerate import Accelerator


class Counted:
    """Watch a run's optimizer steps, and with which parameters each gradient was computed."""

    def __init__(self, run):
        self.updates: list[dict] = []  # one an optimizer step: rows, steps and sigmas it took
        self.versions: list[list[float]] = []  # parameters before each step
        self._run, self._rows = run, self._no_rows()
        self._loss, self._step = run.algorithm.loss, run.policy.step
        run.algorithm.loss, run.policy.step = self._watched_loss, self._watched_step

    @property
    def parameters(self) -> list[float]:
        """Return the trained numbers as they are."""
        return torch.cat([p.detach().flatten() for p in self._run.policy.parameters]).tolist()

    @staticmethod
    def _no_rows() -> dict:
        return {"rows": 0, "forwards": 0, "steps": set(), "parameters": set()}

    def _watched_loss(self, policy, batch):
        rows = self._rows
        real = batch.weight > 0
        rows["rows"] += int(real.sum())
        rows["forwards"] += 1
        rows["steps"] |= set(batch.columns.get("step", torch.zeros(len(real)))[real].tolist())
        rows["parameters"].add(tuple(self.parameters))
        return self._loss(policy, batch)

    def _watched_step(self, update, learning_rate):
        rows, self._rows = self._rows, self._no_rows()
        (parameters,) = rows.pop("parameters")  # one version for all of an update's gradients
        self.versions.append(list(parameters))
        self.updates.append({**rows, "steps": sorted(rows["steps"])})
        return self._step(update, learning_rate)


def count(algorithm: str, settings: dict, num_epochs: int = 2) -> dict:
    """Run a toy configuration and return what it updated."""
    with tempfile.TemporaryDirectory() as folder:
        run = toy.build(toy.config(Path(folder), algorithm, **settings))
    counted = Counted(run)
    metrics = [toy.train_epoch(run) for _ in range(num_epochs)]
    run.rewards.close()
    return {
        "updates": counted.updates,
        "versions": counted.versions,
        "parameters": counted.parameters,
        "count": run.state.update,
        "metrics": metrics,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for case, arguments in json.loads(Path(sys.argv[2]).read_text()).items():
        rank = Accelerator(cpu=True).process_index
        (out / f"{case}-{rank}.json").write_text(json.dumps(count(**arguments)))
    Accelerator(cpu=True).end_training()
    # Gloo's threads sometimes abort the interpreter's own end, after all work is done.
    os._exit(0)
