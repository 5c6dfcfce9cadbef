"""FLUX.1 trains by every algorithm, and what a run leaves behind is what plain diffusers loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from diffusers import FluxPipeline
from safetensors.torch import load_file

from flow_grpo import registry, sde, seeds, session, trainer
from flow_grpo.models import flux
from flow_grpo.models.flux import Flux
from flow_grpo.policy import Policy
from flow_grpo.rollout import sample_trajectory

ROOT = Path(__file__).resolve().parents[2]
SIZE = (32, 32)
PROMPTS = ['"AB" on a red sign', 'the word "CDE"']
# What single algorithms need beside the shrunk preset: NFT's images come from an ODE.
NEEDS = {
    "nft": {
        "sample.noise_level": 0.0,
        "sample.sde_type": "flow_sde",
        "sample.sde_window_size": 0,
        "sample.sde_window_range": (0, 0),
    }
}


@pytest.fixture
def flux_config(tiny_config, tiny_flux_dir):
    """Return the tiny configuration for the tiny FLUX.1."""
    config = tiny_config
    config.pretrained.model = tiny_flux_dir
    config.reward_fn = {"odd_rewards:Contrast": 1.0}
    config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.sample.max_sequence_length = 32
    config.train.learning_rate = 3e-3
    return config


@pytest.fixture
def build(flux_config):
    """Return a function that builds a policy of the tiny FLUX.1, its adapter moved off 0."""

    def policy(**changes) -> Policy:
        config = flux_config.copy_and_resolve_references()
        config.update_from_flattened_dict(changes)
        built = Policy(Flux.load(config, torch.device("cpu")), config, Accelerator(cpu=True))
        with torch.no_grad():
            for place, parameter in enumerate(built.parameters):
                noise = seeds.normal(parameter.shape, 1, seeds.ADAPTER_INIT, member=place)
                parameter.add_(0.05 * noise)
        return built

    return policy


def _cond(policy: Policy):
    return policy.model.encode(policy.module, PROMPTS, size=SIZE, negative=None)


def test_the_adapter_reaches_every_target_of_every_block(build):
    policy = build()
    assert policy.frozen == []
    modules = {name.partition(".lora_")[0] for name in policy.names}
    double = {f"transformer_blocks.{i}.{t}" for i in range(2) for t in Flux.lora_targets}
    # A single block has neither projections of the text nor a feed-forward part of that name.
    single = {
        f"single_transformer_blocks.{i}.attn.{t}"
        for i in range(2)
        for t in ("to_k", "to_q", "to_v")
    }
    assert modules == double | single
    assert len(modules) == 2 * 12 + 2 * 3


def test_the_reference_is_the_base_model_to_the_bit(build, flux_config):
    policy, base = build(), Flux.load(flux_config, torch.device("cpu"))
    x, sigma = seeds.normal((2, 4, 8, 8), 0, seeds.INITIAL_NOISE), torch.tensor([0.9, 0.3])
    cond = _cond(policy)
    with torch.no_grad():
        wanted = base.velocity(base.transformer, x, sigma, cond, 3.5)
        assert torch.equal(policy.velocity(x, sigma, cond, 3.5, weights="reference"), wanted)
        assert (policy.velocity(x, sigma, cond, 3.5) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("sde_type", ["flow_sde", "cps"])
def test_the_ratio_of_an_unchanged_policy_is_exactly_1(build, sde_type, checkpointing, precision):
    policy = build(**{"train.gradient_checkpointing": checkpointing, "mixed_precision": precision})
    model, cond = policy.model, _cond(policy)
    x, window, kind = seeds.normal((2, 4, 8, 8), 0, seeds.INITIAL_NOISE), (0, 2), sde.SDES[sde_type]

    def velocity(x, sigma, *, replay):
        return policy.velocity(x, sigma, cond, 3.5, replay=replay)

    noises = torch.stack([seeds.normal(x.shape, 0, seeds.STEP_NOISE, t=t) for t in window], 1)
    kept = sample_trajectory(
        velocity, x, model.sigmas(4, SIZE), sde=kind, noise_level=0.7,
        stochastic=window, trained=window, noises=noises,
    )  # fmt: skip
    for place, t in enumerate(window):
        at, sigma, sigma_next = (
            kept.latents[:, place],
            *(kept.sigmas[i].expand(2) for i in (t, t + 1)),
        )
        v = model.velocity(policy.module, at, sigma, cond, 3.5)
        assert v.requires_grad
        step = kind.step(at, v, sigma, sigma_next, noise_level=0.7, sigma_max=kept.sigmas[1])
        new = sde.log_prob(step, kept.next_latents[:, place], normalised=kind.normalised)
        assert torch.equal(torch.exp(new - kept.log_probs[:, place]), torch.ones(2))


@pytest.fixture
def trained(flux_config, make_run, monkeypatch):
    """Return a function that trains for an epoch and returns (run, all tensors before)."""
    monkeypatch.syspath_prepend("tests")

    def call(**changes):
        config = flux_config.copy_and_resolve_references()
        config.update_from_flattened_dict({"num_epochs": 1, **changes})
        run = make_run(config.lock(), Flux)
        before = {name: t.clone() for name, t in _tensors(run.model.pipeline).items()}
        trainer.train(run)
        return run, before

    return call


def _tensors(pipeline) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": tensor
        for part, module in pipeline.components.items()
        if isinstance(module, torch.nn.Module)
        for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize("algorithm", registry.names(session.ALGORITHMS))
def test_an_epoch_of_every_algorithm_changes_the_adapter_alone(algorithm, trained, monkeypatch):
    told, velocity = [], Flux.velocity

    def telling(self, module, x, sigma, cond, guidance_scale):
        told.append(guidance_scale)
        return velocity(self, module, x, sigma, cond, guidance_scale)

    monkeypatch.setattr(Policy, "_freeze_unused", lambda self, size: [])  # it asks without guidance
    monkeypatch.setattr(Flux, "velocity", telling)
    run, before = trained(algorithm=algorithm, **NEEDS.get(algorithm, {}))
    assert run.state.update == 2
    assert set(told) == {3.5}  # also where SD3 trains without guidance
    changed = {
        name for name, t in _tensors(run.model.pipeline).items() if not torch.equal(t, before[name])
    }
    assert changed
    assert all(name.startswith("transformer.") and ".lora_" in name for name in changed)


def test_a_saved_adapter_gives_the_same_image_in_plain_diffusers(trained, tiny_flux_dir):
    run, _ = trained(**{"train.learning_rate": 3e-2})
    x = seeds.normal((2, 4, 8, 8), 0, seeds.EVAL_NOISE)
    cond = run.model.encode(run.policy.module, PROMPTS, size=SIZE, negative=None)

    def velocity(x, sigma, *, replay):
        return run.policy.velocity(x, sigma, cond, 3.5)

    with torch.no_grad(), run.policy.weights("ema"):
        final = sample_trajectory(velocity, x, run.model.sigmas(4, SIZE)).final
        wanted = run.model.decode(final)
    pipeline = FluxPipeline.from_pretrained(tiny_flux_dir)
    pipeline.set_progress_bar_config(disable=True)

    def images():
        return pipeline(
            PROMPTS, latents=flux.pack(x), height=32, width=32, num_inference_steps=4,
            guidance_scale=3.5, max_sequence_length=32, output_type="pt",
        ).images  # fmt: skip

    assert (images() - wanted).abs().max() > 1e-3, "the adapter must matter"
    (checkpoint,) = run.folder.checkpoints.iterdir()
    pipeline.load_lora_weights(checkpoint / "lora")
    torch.testing.assert_close(images(), wanted, rtol=0, atol=1e-5)
    card = (checkpoint / "lora" / "README.md").read_text()
    assert "from diffusers import FluxPipeline" in card
    assert "guidance_scale=3.5" in card


def test_an_interrupted_run_ends_as_one_that_was_not(trained, flux_config):
    once, _ = trained(num_epochs=2, run_name="once")
    trained(num_epochs=1, run_name="twice")[0].folder.close()
    twice, _ = trained(num_epochs=2, run_name="twice")
    assert twice.state.epoch == 2
    for folder in ("lora/pytorch_lora_weights", "state/optimizer", "state/ema"):
        first, second = (
            load_file(run.folder.checkpoints / "checkpoint-2" / f"{folder}.safetensors")
            for run in (once, twice)
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_flux", "train_flux_kontext"])
def test_a_script_trains_in_bf16_as_its_preset_says(script, request, edit_set, tmp_path):
    """Run the printed command, shrunk: autocast, bf16 weights, and a ratio of exactly 1."""
    preset, fixture, dataset = {
        "train_flux": ("pickscore_flux_8gpu", "tiny_flux_dir", "dataset/tiny_ocr"),
        "train_flux_kontext": ("counting_flux_kontext", "tiny_flux_kontext_dir", str(edit_set)),
    }[script]
    done = subprocess.run(
        [
            sys.executable, f"scripts/{script}.py", f"--config=config/grpo.py:{preset}",
            f"--config.pretrained.model={request.getfixturevalue(fixture)}",
            f"--config.logdir={tmp_path}", f"--config.dataset={dataset}",
            "--config.reward_fn=odd_rewards:Contrast:1.0", "--config.resolution=32",
            "--config.num_epochs=2", "--config.trackers=none", "--config.eval.num_steps=2",
            "--config.eval.num_prompts=2", "--config.sample.groups_per_epoch=4",
            "--config.sample.group_size=3",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={
            **os.environ, "ACCELERATE_USE_CPU": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / preset / "summary.json").read_text())
    assert summary["epochs"] == 2
    assert summary["ratio_dev_first_max"] == 0.0
    adapter = load_file(
        tmp_path / preset / "checkpoints/checkpoint-2/lora/pytorch_lora_weights.safetensors"
    )
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
