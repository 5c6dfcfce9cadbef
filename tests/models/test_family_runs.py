"""Runs of every family on its tiny pipeline: algorithms, resuming, what plain diffusers loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import diffusers
import families
import pytest
import torch
from families import FAMILIES
from PIL import Image
from safetensors.torch import load_file

from flow_grpo import cli, registry, seeds, session, trainer
from flow_grpo.images import open_image
from flow_grpo.rollout import sample_trajectory

ROOT = Path(__file__).resolve().parents[2]
SAME = {"rtol": 0.0, "atol": 1e-5}
PRESETS = {
    "grpo": "grpo.py:tiny_flow_sde",
    "grpo_guard": "grpo_guard.py:tiny_guard",
    "dpo": "dpo.py:tiny_dpo",
    "sft": "sft.py:tiny_sft",
    "nft": "nft.py:tiny_nft",
    "rwr": "sft.py:tiny_rwr",
}
IN_THE_FAST_SUITE = ("flux_kontext", "qwenimage")  # where every repetition is run
every_family = pytest.mark.parametrize("name", FAMILIES)
two_families = pytest.mark.parametrize(
    "name",
    [
        name if name in IN_THE_FAST_SUITE else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
several = pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        pytest.param(name, algorithm, marks=[] if fast else [pytest.mark.slow])
        for name in FAMILIES
        for algorithm in registry.names(session.ALGORITHMS)
        for fast in [algorithm == "grpo" or name in IN_THE_FAST_SUITE]
    ],
)


@pytest.fixture
def no_report(monkeypatch):
    """Let runs draw no report, which takes several times as long as they do."""
    monkeypatch.setattr(trainer, "write_report", lambda *args, **kwargs: None)


def _edit_set(edit_set: Path, folder: Path, count: int) -> Path:
    """Write prompts with `count` images each of `edit_set` below `folder`."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        files = [str(edit_set / split / f"{i}.png") for i in range(3)]
        images = [[files[i - j] for j in range(count)] for i in range(3)]
        lines = [json.dumps({"prompt": "make it red", "image": own}) for own in images]
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def arguments(tiny_dir, edit_set, tmp_path):
    """Return a function that returns the command line of a small run of a family."""

    def call(name: str, algorithm: str = "grpo", **changes) -> list[str]:
        count, data = FAMILIES[name].references, {}
        if count:
            folder = _edit_set(edit_set, tmp_path / "edits", count)
            data = {"dataset": folder, "prompt_fn": "geneval"}
        settings = {
            **families.values(name, tiny_dir(name)), "logdir": tmp_path, "run_name": "run",
            **data,
            "num_epochs": 1, "trackers": "none", "eval_freq": 1, "save_freq": 1,
            "reward_fn": "odd_rewards:Contrast:1.0", "reward.num_workers": 1,
            "sample.groups_per_epoch": 2, "sample.group_size": 2, "sample.batch_size": 4,
            "sample.num_steps": 3, "eval.num_steps": 2, "eval.num_prompts": 2,
            "eval.batch_size": 2, "eval.num_samples": 1, "train.updates_per_epoch": 1,
            "train.learning_rate": 3e-2, "sample.sde_window_size": 0,
            "sample.sde_window_range": (0, 0), **changes,
        }  # fmt: skip
        preset = f"--config={ROOT / 'config'}/{PRESETS[algorithm]}"
        return [preset, *(f"--config.{key}={value}" for key, value in settings.items())]

    return call


@pytest.fixture
def trained(arguments, make_run, no_report, monkeypatch):
    """Return a function that trains an epoch: (run, every tensor of the pipeline before)."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))

    def call(name: str, algorithm: str = "grpo", **changes):
        config = cli.parse(["train", *arguments(name, algorithm, **changes)])
        run = make_run(config, families.adapter(name))
        before = {key: tensor.clone() for key, tensor in _tensors(run.model.pipeline).items()}
        trainer.train(run)
        return run, before

    return call


def _tensors(pipeline) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{key}": tensor
        for part, module in pipeline.components.items()
        if isinstance(module, torch.nn.Module)
        for key, tensor in module.state_dict().items()
    }


def _column(run: Path, key: str) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def _lora(run: Path, epoch: int) -> Path:
    return run / "checkpoints" / f"checkpoint-{epoch}" / "lora"


def _module(parameter: str) -> str:
    """Return the module of an adapter's parameter."""
    return parameter.removeprefix("transformer.").partition(".lora_")[0]


@several
def test_an_update_of_every_algorithm_changes_the_adapter_alone(
    name, algorithm, trained, monkeypatch
):
    adapter, told = families.adapter(name), set()
    velocity = adapter.velocity

    def telling(self, module, x, sigma, cond, guidance_scale):
        if len(x) > 1:  # a policy's probe is of one sample, without guidance
            told.add(guidance_scale)
        return velocity(self, module, x, sigma, cond, guidance_scale)

    monkeypatch.setattr(adapter, "velocity", telling)
    run, before = trained(name, algorithm)
    assert run.config.algorithm == algorithm
    assert run.state.update == 1
    changed = {
        key for key, t in _tensors(run.model.pipeline).items() if not torch.equal(t, before[key])
    }
    trained_names = {f"transformer.{key}" for key in run.policy.names}
    assert changed <= trained_names
    assert all(".lora_" in key for key in trained_names)
    # B starts at 0, so that in a first update A has no gradient; AdamW's decay moves it.
    still = {_module(key) for key in trained_names - changed}
    assert still == FAMILIES[name].still
    assert not any(".lora_A." in key for key in trained_names - changed)
    # Others learn without classifier-free guidance from images that were made with it; a model
    # that is told its guidance is told the same always.
    scale = FAMILIES[name].guidance_scale
    untold = set() if adapter.negative is None or "grpo" in algorithm else {1.0}
    assert told == {scale} | untold


def _own_image(run, name: str, x: torch.Tensor, prompt, images) -> torch.Tensor:
    """Return the image (3, h, w) or clip (f, 3, h, w) that the policy makes as in evaluations."""
    scale, model = run.config.eval.guidance_scale, run.model
    cond = model.encode(run.policy.module, [prompt], images, size=run.size, negative=model.negative)

    def velocity(x, sigma, *, replay):
        return run.policy.velocity(x, sigma, cond, scale)

    with torch.no_grad(), run.policy.weights("ema" if run.policy.ema else "current"):
        sigmas = model.sigmas(run.config.eval.num_steps, run.size)
        return model.decode(sample_trajectory(velocity, x, sigmas).final)[0]


@every_family
def test_the_model_cards_code_makes_the_policys_image_in_plain_diffusers(
    name, trained, edit_set, monkeypatch
):
    run, _ = trained(name)
    model, prompt = run.model, run.eval_prompts[0]
    # Of other shapes than the image to make.
    files = [edit_set / "test" / f"{i}.png" for i in (2, 1)][: FAMILIES[name].references]
    images = [[open_image(file) for file in files]] if files else None
    x = seeds.normal((1, *model.latent_shape(run.size)), 0, seeds.EVAL_NOISE)
    wanted = _own_image(run, name, x, prompt.prompt, images)
    folder = _lora(run.folder.path, 1)
    card = (folder / "README.md").read_text()
    assert f"pipeline_tag: {model.task}" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    cls, kind = getattr(diffusers, model.pipeline_class), model.task.rpartition("-")[2]
    call = cls.__call__

    def from_x(self, *args, **kwargs):
        self.set_progress_bar_config(disable=True)
        return call(self, *args, **kwargs, latents=model.stock_latents(x), output_type="pt")

    monkeypatch.setattr(cls, "__call__", from_x)
    code = code.replace("THIS FOLDER", str(folder))
    code = code.replace("IMAGE", '", "'.join(map(str, files)))

    def plain(code: str) -> torch.Tensor:
        names = {}
        with torch.no_grad():
            exec(code, names)  # our own text
        return names[kind]

    torch.testing.assert_close(plain(code), wanted, **SAME)
    for control in (
        re.sub(r"pipe.load_lora_weights\(.*\)", "", code),
        re.sub(r'\bprompt="(\\"|[^"])*"', 'prompt="another"', code),
        re.sub(r"(guidance_scale|true_cfg_scale)=[\d.]+", r"\1=2.0", code),
    ):
        assert control != code
        assert (plain(control) - wanted).square().mean().sqrt() > 10 * SAME["atol"], control


@every_family
def test_a_resumed_run_equals_a_whole_one(name, arguments, train, no_report, tmp_path):
    adapter, runs = families.adapter(name), (tmp_path / "whole", tmp_path / "resumed")
    start = _lora(runs[0], 1).parent
    for changes in ({"run_name": "whole"}, {"run_name": "resumed", "resume_from": start}):
        outcome = train(*arguments(name, num_epochs=2, **changes), adapter=adapter)
        assert outcome.code == 0, outcome.err
    for file in ("lora/pytorch_lora_weights", "state/optimizer", "state/ema"):
        whole, resumed, first = (
            load_file(_lora(run, epoch).parent / f"{file}.safetensors")
            for run, epoch in ((runs[0], 2), (runs[1], 2), (runs[0], 1))
        )
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
        assert any(not torch.equal(whole[key], first[key]) for key in whole)
    for key in ("train/loss", "reward/total", "eval/total"):
        columns = [_column(run, key) for run in runs]
        assert columns[1]
        assert columns[0][-len(columns[1]) :] == columns[1]
    assert not _lora(runs[1], 1).exists(), "the first epoch must not have been run again"
    assert _column(runs[0], "train/ratio_dev_first") == [0.0, 0.0]


@two_families
def test_the_first_update_of_an_epoch_has_ratio_one_in_bf16(
    name, arguments, fresh_accelerator, train, no_report, tmp_path
):
    line = arguments(name, mixed_precision="bf16")
    outcome = train(
        *line, "--config.train.gradient_checkpointing=True", adapter=families.adapter(name)
    )
    assert outcome.code == 0, outcome.err
    assert _column(tmp_path / "run", "train/ratio_dev_first") == [0.0]
    assert _column(tmp_path / "run", "train/grad_norm")[0] > 0
    adapter = load_file(_lora(tmp_path / "run", 1) / "pytorch_lora_weights.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}


@pytest.mark.slow
@every_family
def test_a_script_trains_in_its_own_process(name, arguments, tmp_path):
    line = arguments(name, mixed_precision="bf16")
    command = [sys.executable, f"scripts/{FAMILIES[name].script}.py", *line]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "ACCELERATE_USE_CPU": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["epochs"] == 1
    assert summary["ratio_dev_first_max"] == 0.0


def test_a_runs_clips_are_animated(arguments, train, tmp_path):
    outcome = train(*arguments("wan2_1"), adapter=families.adapter("wan2_1"))
    assert outcome.code == 0, outcome.err
    (file,) = (tmp_path / "run" / "samples" / "epoch-000001").glob("*.webp")
    with Image.open(file) as clip:
        assert (clip.n_frames, clip.size) == (5, (32, 32))
    assert "data:image/webp;base64," in (tmp_path / "run" / "report.html").read_text()
