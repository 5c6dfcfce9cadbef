"""Runs of every family on its tiny pipeline: ratio 1, resuming, an adapter that diffusers loads."""

import importlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from safetensors.torch import load_file

import config.grpo
from flow_grpo import export, registry, seeds, trainer
from flow_grpo.models.qwenimage import QwenImage
from flow_grpo.models.wan2_1 import Wan21
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory

ROOT = Path(__file__).resolve().parents[2]
LENGTH, SIZE = 48, (32, 32)
PROMPT = '"AB" on a red sign'
SAME = {"rtol": 0.0, "atol": 1e-5}


class Family(NamedTuple):
    """What a test needs to know about a model family."""

    adapter: type
    preset: str
    folder: str  # fixture
    card: str  # what the model card says about guidance
    zero: set  # modules of the adapter whose gradient is 0, though there is one


FAMILIES = {
    "qwenimage": Family(
        QwenImage,
        "pickscore_qwenimage",
        "tiny_qwenimage_dir",
        'true_cfg_scale=4.0, negative_prompt=" "',
        {"1.attn.add_q_proj"},  # in the joint attention the text's last queries come to nothing
    ),
    "wan2_1": Family(
        Wan21, "general_ocr_wan2_1", "tiny_wan_dir", "guidance_scale=4.5, num_frames=5", set()
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture
def fresh_accelerator():
    """Let a test choose its precision: accelerate keeps the first one of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def _arguments(family: Family, folder: str, runs: Path, **changes) -> list[str]:
    settings = {
        "pretrained.model": folder, "logdir": runs, "run_name": "run", "mixed_precision": "no",
        "resolution": 32, "width": 0, "num_frames": 5, "num_epochs": 2, "trackers": "none",
        "dataset": "dataset/tiny_ocr", "eval_freq": 1, "save_freq": 1,
        "sample.max_sequence_length": LENGTH, "sample.groups_per_epoch": 2,
        "sample.group_size": 4, "sample.batch_size": 4, "sample.num_steps": 6,
        "eval.num_steps": 2, "eval.num_prompts": 2, "eval.batch_size": 2, "reward.num_workers": 1,
        "reward_fn": "odd_rewards:Contrast:1.0", **changes,
    }  # fmt: skip
    arguments = [f"--config.{key}={value}" for key, value in settings.items()]
    return [f"--config={ROOT / 'config' / 'grpo.py'}:{family.preset}", *arguments]


def _column(run: Path, key: str) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def _adapter_file(run: Path, epoch: int) -> Path:
    folder = run / "checkpoints" / f"checkpoint-{epoch}" / "lora"
    return folder / "pytorch_lora_weights.safetensors"


ALGORITHMS = {
    "grpo": "tiny_flow_sde",
    "grpo_guard": "tiny_guard",
    "dpo": "tiny_dpo",
    "sft": "tiny_sft",
    "nft": "tiny_nft",
    "rwr": "tiny_rwr",
}


def _shrink(settings, folder: str, runs: Path):
    settings.pretrained.model, settings.mixed_precision = folder, "no"
    settings.logdir, settings.run_name, settings.trackers = str(runs), "run", ()
    settings.resolution, settings.width, settings.num_frames = 32, 0, 5
    settings.dataset, settings.reward_fn = "dataset/tiny_ocr", {"odd_rewards:Contrast": 1.0}
    settings.reward.num_workers = 1
    settings.sample.max_sequence_length, settings.num_epochs = LENGTH, 1
    settings.sample.groups_per_epoch, settings.sample.group_size = 2, 4
    settings.sample.batch_size, settings.train.updates_per_epoch = 4, 1
    settings.eval.num_steps, settings.eval.num_prompts, settings.eval.batch_size = 2, 2, 2
    return settings.lock()


@every_family
@pytest.mark.parametrize("algorithm", registry.names("flow_grpo.algorithms"))
def test_an_update_of_every_algorithm_changes_the_adapter_alone(
    algorithm, family, make_run, request, tmp_path
):
    file = algorithm if algorithm != "rwr" else "sft"
    settings = importlib.import_module(f"config.{file}").get_config(ALGORITHMS[algorithm])
    settings.sample.guidance_scale = settings.eval.guidance_scale = 3.0
    run = make_run(
        _shrink(settings, request.getfixturevalue(family.folder), tmp_path), adapter=family.adapter
    )
    assert run.algorithm.__class__.__name__.lower() == algorithm.replace("_", "")
    parts = {n: p for n, p in run.model.pipeline.components.items() if hasattr(p, "state_dict")}
    before = {
        f"{part}.{name}": tensor.clone()
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    trainer.train(run)
    trained = {f"transformer.{name}" for name in run.policy.names}
    changed = {
        f"{part}.{name}"
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
        if not torch.equal(tensor, before[f"{part}.{name}"])
    }
    assert changed <= trained
    # B starts at 0, so A gets no gradient in a first update, but AdamW's decay may move it.
    still = {name for name in trained if ".lora_B." in name} - changed
    assert {re.sub(r".*\.(\d\..*)\.lora_B.*", r"\1", name) for name in still} == family.zero


# As the reference has them; peft silently passes over a target that no module bears.
ATTENTION = {"add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"}
OWN = {"to_k", "to_q", "to_v", "to_out.0"}
MODULES = {
    "qwenimage": {f"attn.{name}" for name in ATTENTION | OWN}
    | {f"{s}_mlp.{n}" for s in ("img", "txt") for n in ("net.0.proj", "net.2")},
    "wan2_1": {f"attn{number}.{name}" for name in OWN for number in (1, 2)},  # no image attention
}
# The text half of Qwen-Image's last block ends nowhere: no gradient for output and feed-forward.
UNUSED = {
    "qwenimage": {"attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"},
    "wan2_1": set(),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_adapter_lies_where_the_reference_has_it(name, make_run, request, tmp_path):
    family = FAMILIES[name]
    settings = config.grpo.get_config(family.preset)
    folder = request.getfixturevalue(family.folder)
    run = make_run(_shrink(settings, folder, tmp_path), adapter=family.adapter)
    found = {"0": set(), "1": set()}
    for parameter in [*run.policy.names, *run.policy.frozen]:
        block, module = re.fullmatch(r"\w+\.(\d)\.(.*)\.lora_[AB]\..*", parameter).groups()
        found[block].add(module)
    assert found == {"0": MODULES[name], "1": MODULES[name]}
    unused = {re.sub(r"\.lora_.*", "", parameter) for parameter in run.policy.frozen}
    assert unused == {f"transformer_blocks.1.{module}" for module in UNUSED[name]}
    sizes = settings.train.lora_rank, settings.train.lora_alpha
    assert sizes == {"qwenimage": (64, 128), "wan2_1": (32, 64)}[name]


@every_family
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_first_update_of_an_epoch_has_ratio_one(
    family, precision, fresh_accelerator, train, request, tmp_path
):
    folder = request.getfixturevalue(family.folder)
    changes = {"num_epochs": 1, "mixed_precision": precision}
    outcome = train(*_arguments(family, folder, tmp_path, **changes), adapter=family.adapter)
    assert outcome.code == 0, outcome.err
    assert _column(tmp_path / "run", "train/ratio_dev_first") == [0.0]
    assert _column(tmp_path / "run", "train/grad_norm")[0] > 0


@every_family
def test_a_resumed_run_equals_a_whole_one_and_its_adapter_works_in_plain_diffusers(
    family, train, request, tmp_path
):
    folder = request.getfixturevalue(family.folder)
    for name, stops in (("whole", (2,)), ("parts", (1, 2))):
        for stop in stops:
            changes = {"run_name": name, "num_epochs": stop, "train.learning_rate": 1e-2}
            arguments = _arguments(family, folder, tmp_path, **changes)
            outcome = train(*arguments, adapter=family.adapter)
            assert outcome.code == 0, outcome.err
    runs = tmp_path / "whole", tmp_path / "parts"
    whole, parts = (load_file(_adapter_file(run, 2)) for run in runs)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    first = load_file(_adapter_file(runs[0], 1))
    assert any(not torch.equal(whole[key], first[key]) for key in whole)
    for key in ("train/loss", "reward/total", "eval/total"):
        assert _column(runs[0], key) == _column(runs[1], key)
        assert len(_column(runs[0], key)) >= 2
    card = (_adapter_file(runs[0], 2).parent / "README.md").read_text()
    assert family.card in card
    assert (runs[0] / "report.html").stat().st_size > 10_000


@every_family
def test_the_saved_adapter_gives_the_policys_own_image(family, make_run, request, tmp_path):
    folder = request.getfixturevalue(family.folder)
    settings = _shrink(config.grpo.get_config(family.preset), folder, tmp_path)
    run = make_run(settings, adapter=family.adapter)
    noise = seeds.generator(0, seeds.STEP_NOISE)
    for parameter in run.policy.parameters:
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=noise)
    model, scale = run.model, settings.eval.guidance_scale
    x = seeds.normal((1, *model.latent_shape(SIZE)), 0, seeds.INITIAL_NOISE)
    cache = PromptCache(model, model.transformer, size=SIZE, negative=model.negative, max_size=9)
    cond = cache([PROMPT], "cpu")

    def velocity(x, sigma, *, replay):
        return run.policy.velocity(x, sigma, cond, scale)

    own = sample_trajectory(velocity, x, model.sigmas(4, SIZE)).final
    if run.policy.ema:
        run.policy.ema.tensors[:] = [p.detach().clone() for p in run.policy.parameters]
    export.write_weights(run, run.policy.exported(), tmp_path / "weights")

    card = (tmp_path / "weights" / "lora" / "README.md").read_text()
    assert f"pipeline_tag: {model.task}" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    names = {}
    exec(code.replace("THIS FOLDER", str(tmp_path / "weights" / "lora")), names)  # our own text
    kind = model.task.rpartition("-")[2]
    assert names[kind] is not None
    stock = names["pipe"]  # with the adapter; its settings are the card's
    stock.set_progress_bar_config(disable=True)

    def plain():
        return stock(
            PROMPT, latents=model.stock_latents(x), height=32, width=32, num_inference_steps=4,
            max_sequence_length=LENGTH, output_type="latent", return_dict=False,
            **model.stock_settings(scale),
        )[0].reshape(x.shape)  # fmt: skip

    torch.testing.assert_close(own, plain(), **SAME)
    stock.disable_lora()
    assert (own - plain()).abs().mean() > 1e-2, "the adapter must matter"


def test_a_runs_clips_are_animated(train, tiny_wan_dir, tmp_path):
    arguments = _arguments(FAMILIES["wan2_1"], tiny_wan_dir, tmp_path, num_epochs=1)
    outcome = train(*arguments, adapter=Wan21)
    assert outcome.code == 0, outcome.err
    files = sorted((tmp_path / "run" / "samples" / "epoch-000001").glob("*.webp"))
    assert len(files) == 2
    with Image.open(files[0]) as clip:
        assert (clip.n_frames, clip.size) == (5, (32, 32))
    assert "data:image/webp;base64," in (tmp_path / "run" / "report.html").read_text()
