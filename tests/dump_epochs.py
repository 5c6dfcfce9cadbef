"""Run some epochs of several configurations and save all they consist of, for test_exactness.py.

    python tests/dump_epochs.py OUT CASES.json
    torchrun --nproc_per_node 2 tests/dump_epochs.py OUT CASES.json

CASES.json holds {case: command line}. What is called is what the trainer calls: collect, score,
advantages, update. Each rank writes OUT/<case>-<epoch>-<rank>.safetensors and ....json.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from flow_grpo import cli, collecting, evaluation, session, updating
from flow_grpo.models.sd3 import SD3
from flow_grpo.progress import progress_bar
from flow_grpo.run_folder import RunFolder


def dump(case: str, arguments: list[str], out: Path, num_epochs: int = 2) -> None:
    """Run one configuration."""
    config = cli.parse(["dump_epochs.py", *arguments])
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    plan = session.check_config(config, accelerator.num_processes)
    folder = session.main_process(accelerator, lambda: RunFolder(config))
    run = session.build(SD3, config, accelerator, plan, folder)
    submit, seen = run.rewards.submit, []

    def submit_and_keep(samples, **names):
        seen.append(samples)
        return submit(samples, **names)

    run.rewards.submit = submit_and_keep
    for epoch in range(num_epochs):
        seen.clear()
        bar = progress_bar(accelerator, case, 1)
        run.state.epoch = epoch
        collected = collecting.collect(run, epoch, bar)
        sampled = list(seen)
        scores, metrics = collecting.score(run, collected)
        advantages = run.algorithm.advantages(scores)
        metrics |= updating.update(run, collected, scores)
        tensors = {
            **collected.tensors,
            "images": torch.cat([samples.images for samples in sampled]),
            "total": scores.total,
            "advantages": advantages,
            **dict(zip(run.policy.names, run.policy.parameters, strict=True)),
        }
        stem = out / f"{case}-{epoch}-{accelerator.process_index}"
        save_file({k: t.detach().contiguous() for k, t in tensors.items()}, f"{stem}.safetensors")
        texts = {
            "prompts": [prompt for samples in sampled for prompt in samples.prompts],
            "trained": collected.steps.trained,
            "metrics": metrics,
            "evaluation": evaluation.evaluate(run, bar.update)[0],
        }
        Path(f"{stem}.json").write_text(json.dumps(texts))
    run.rewards.close()


if __name__ == "__main__":
    for name, line in json.loads(Path(sys.argv[2]).read_text()).items():
        dump(name, line, Path(sys.argv[1]))
    Accelerator(cpu=True).end_training()
