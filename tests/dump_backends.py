"""Train, save and resume on the back-end of the launch, and save the states; for test_backends.py.

    accelerate launch --config_file FILE.yaml tests/dump_backends.py OUT CASES.json

CASES.json holds {case: command line}. Every case trains two epochs, saving after the first, and is
then resumed from there for the second one. The main process writes OUT/<case>-<kind>.safetensors
of the last state, OUT/<case>-resumed-<kind>.safetensors of the resumed run's, the names and shapes
of what it left, and OUT/<case>.json with metrics.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

from flow_grpo import cli, collecting, evaluation, resume, session, updating
from flow_grpo.models.sd3 import SD3
from flow_grpo.processes import accelerator_of_launch
from flow_grpo.progress import progress_bar
from flow_grpo.run_folder import RunFolder


def _epoch(run) -> dict[str, float]:
    bar = progress_bar(run.accelerator, "epoch", 1)
    collected = collecting.collect(run, run.state.epoch, bar)
    scores, metrics = collecting.score(run, collected)
    metrics |= updating.update(run, collected, scores)
    run.state.epoch += 1
    return metrics | evaluation.evaluate(run, bar.update)[0]


def _build(arguments: list[str]):
    config = cli.parse(["dump_backends.py", *arguments])
    AcceleratorState._reset_state()  # cases differ in their precision
    accelerator = accelerator_of_launch(config.mixed_precision)
    plan = session.check_config(config, accelerator.num_processes, adapter=SD3)
    folder = session.main_process(accelerator, lambda: RunFolder(config))
    return session.build(SD3, config, accelerator, plan, folder)


def _close(run) -> None:
    run.rewards.close()
    if run.folder is not None:
        run.folder.close()


def dump(case: str, arguments: list[str], out: Path) -> None:
    """Run one configuration."""
    run = _build(arguments)
    if run.is_main:
        run.folder.metrics.touch()
    _dump_state(run, out / f"{case}-start")
    own = [tuple(tensor.shape) for tensor in run.policy.tensors]
    metrics = [_epoch(run)]
    resume.save(run)
    metrics.append(_epoch(run))
    _dump_state(run, out / case)
    _close(run)
    again = _build(arguments)
    resume.restore(again)
    assert again.state.epoch == 1
    metrics.append(_epoch(again))
    _dump_state(again, out / f"{case}-resumed")
    _close(again)
    told = {
        "metrics": metrics,
        "backend": type(run.policy._backend).__name__,
        "numbers": [sum(map(_product, own)), run.policy.num_trained],
        "dtypes": sorted({str(p.dtype) for p in run.model.transformer.parameters()}),
    }
    rank = run.accelerator.process_index
    (out / f"{case}-{rank}.json").write_text(json.dumps(told))


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _dump_state(run, stem: Path) -> None:
    state = run.policy.state()
    if run.is_main:
        for kind, tensors in state.items():
            save_file(tensors, f"{stem}-{kind}.safetensors")


if __name__ == "__main__":
    for name, line in json.loads(Path(sys.argv[2]).read_text()).items():
        dump(name, line, Path(sys.argv[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Gloo's threads sometimes abort the interpreter's own end, after all work is done.
    os._exit(0)
