"""Train, save and resume on the back-end of the launch, and save the states; for test_backends.py.

    accelerate launch --config_file FILE.yaml tests/dump_backends.py OUT CASES.json [OTHER]

CASES.json holds {case: command line}. Every case trains two epochs, saving after the first, and is
then resumed from there for the second one. The main process writes OUT/<case>-<when>-<kind> of the
states: `start`, `end`, `resumed` (the end of the resumed run) and, if another OUT is named, `moved`
(what is read from its checkpoint); each rank writes OUT/<case>-<rank>.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

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
    if AcceleratorState._shared_state.get("_mixed_precision") not in (None, config.mixed_precision):
        AcceleratorState._reset_state()  # cases differ in their precision
    accelerator = accelerator_of_launch(config.mixed_precision)
    plan = session.check_config(config, accelerator.num_processes, adapter=SD3)
    folder = session.main_process(accelerator, lambda: RunFolder(config))
    return session.build(SD3, config, accelerator, plan, folder)


def _close(run) -> None:
    run.rewards.close()
    if run.folder is not None:
        run.folder.close()


def dump(case: str, arguments: list[str], out: Path, other: Path | None) -> None:
    """Run one configuration."""
    run = _build(arguments)
    if run.is_main:
        run.folder.metrics.touch()
    _dump_state(run, out / f"{case}-start")
    shares = [tensor.numel() for tensor in run.policy.tensors]
    dtypes = sorted({str(p.dtype) for p in run.model.transformer.parameters()})
    metrics = [_epoch(run)]
    resume.save(run)
    metrics.append(_epoch(run))
    _dump_state(run, out / f"{case}-end")
    _close(run)
    again = _resumed(arguments)
    metrics.append(_epoch(again))
    _dump_state(again, out / f"{case}-resumed")
    refused = _refused_gradient(again)
    _close(again)
    if other is not None:
        path = other / "runs" / case / "checkpoints" / "checkpoint-1"
        named = [f"--config.run_name={case}-moved", f"--config.resume_from={path}"]
        moved = _resumed([*arguments, *named])
        _dump_state(moved, out / f"{case}-moved")
        _close(moved)
    told = {
        "refused": refused,
        "metrics": metrics,
        "share": sum(shares),
        "whole": run.policy.num_trained,
    }
    groups = sum(isinstance(module, FSDPModule) for module in run.model.transformer.modules())
    told |= {"backend": type(run.policy._backend).__name__, "dtypes": dtypes, "groups": groups}
    (out / f"{case}-{run.accelerator.process_index}.json").write_text(json.dumps(told))


def _refused_gradient(run) -> str:
    """Return what is said of a gradient that is not finite; the weights must stay as they were."""
    policy, device = run.policy, run.accelerator.device
    before = [tensor.clone() for tensor in policy.tensors]
    x = torch.ones(2, *run.model.latent_shape(run.size), device=device)
    cond = run.prompt_cache([prompt.prompt for prompt in run.prompts[:2]], device)
    with policy.accumulate(sync=True):
        v = policy.velocity(x, torch.full((2,), 0.5, device=device), cond, 1.0)
        policy.backward(v.sum() * torch.nan)
    try:
        policy.step(run.state.update, 1e-3)
        said = "nothing"
    except FloatingPointError as error:
        said = str(error)
    assert all(map(torch.equal, policy.tensors, before))
    return said


def _resumed(arguments: list[str]):
    run = _build(arguments)
    resume.restore(run)
    assert run.state.epoch == 1
    return run


def _dump_state(run, stem: Path) -> None:
    state = run.policy.state()
    if run.is_main:
        for kind, tensors in state.items():
            save_file(tensors, f"{stem}-{kind}.safetensors")


if __name__ == "__main__":
    out, cases, *other = map(Path, sys.argv[1:])
    for name, line in json.loads(cases.read_text()).items():
        dump(name, line, out, other[0] if other else None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Gloo's threads sometimes abort the interpreter's own end, after all work is done.
    os._exit(0)
