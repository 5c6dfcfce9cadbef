"""Adapters come in and go out at the strength they were trained at."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from accelerate import Accelerator
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from flow_grpo import export, lora, seeds
from flow_grpo.models.sd3 import SD3
from flow_grpo.policy import Policy

SIZE = (32, 32)
PROMPT = '"AB" on a red sign'
RANK, ALPHA = 4, 12  # strength 3: a folded alpha cannot be mistaken for none
CHANGED = 1e-2  # least largest change of a velocity or an image that an adapter makes here


def _randomise(parameters, scale: float = 0.1) -> None:
    """Put random values into all tensors: an untrained B is 0, and then nothing shows."""
    with torch.no_grad():
        for place, parameter in enumerate(parameters):
            parameter.copy_(
                scale * seeds.normal(parameter.shape, 5, seeds.ADAPTER_INIT, member=place)
            )


@pytest.fixture
def build(tiny_config):
    """Return a function that builds a policy with changes to config.train."""

    def policy(**train) -> Policy:
        config = tiny_config.copy_and_resolve_references().unlock()
        for name, value in {"lora_rank": RANK, "lora_alpha": ALPHA, **train}.items():
            config.train[name] = value
        policy = Policy(SD3.load(config, torch.device("cpu")), config, Accelerator(cpu=True))
        policy.config = config
        return policy

    return policy


def _velocity(transformer, model: SD3) -> torch.Tensor:
    cond = model.encode(transformer, [PROMPT], size=SIZE, negative=None)
    x = seeds.normal((1, 4, 8, 8), 0, seeds.INITIAL_NOISE)
    with torch.no_grad():
        return model.velocity(transformer, x, torch.full((1,), 0.6), cond, 1.0)


def _current(policy: Policy) -> torch.Tensor:
    return _velocity(policy.module, policy.model)


def _stock(folder: str):
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _images(pipeline) -> torch.Tensor:
    return pipeline(
        PROMPT,
        latents=seeds.normal((1, 4, 8, 8), 0, seeds.INITIAL_NOISE),
        height=32,
        width=32,
        num_inference_steps=3,
        guidance_scale=1.0,
        max_sequence_length=0,
        output_type="pt",
    ).images


def _write(policy: Policy, path) -> str:
    """Write the folder that a checkpoint holds, by the code that checkpoints use."""
    run = SimpleNamespace(
        policy=policy,
        model=policy.model,
        config=policy.config,
        state=SimpleNamespace(epoch=3, update=6),
        rewards=SimpleNamespace(weights={"ocr": 1.0}),
        eval_prompts=[SimpleNamespace(prompt='"AB" on a red sign')],
    )
    export.write_weights(run, policy.exported(), path)
    return str(path / "lora")


@pytest.fixture(scope="module")
def peft_folder(tmp_path_factory):
    """Return a function: save a random PEFT adapter as published ones are; (folder, velocity)."""

    def save(**settings):
        model = SD3(tiny_models.sd3(), "cpu", max_sequence_length=0)
        settings = {"r": 32, "lora_alpha": 64, **settings}
        settings.setdefault("target_modules", list(SD3.lora_targets))
        wrapped = get_peft_model(model.transformer, LoraConfig(**settings))
        _randomise((p for p in wrapped.parameters() if p.requires_grad), 0.05)
        folder = tmp_path_factory.mktemp("peft")
        wrapped.save_pretrained(str(folder))
        return str(folder), _velocity(wrapped, model)

    return save


def test_exports_have_alpha_folded_into_b(build):
    policy = build()
    _randomise(policy.parameters)
    raw, exported = lora.state(policy.model.transformer), lora.export_state(policy.module)
    assert raw.keys() == exported.keys()
    for key, tensor in exported.items():
        strength = ALPHA / RANK if "lora_B" in key else 1
        assert torch.equal(tensor, raw[key] * strength)
        assert not tensor.requires_grad


def test_a_fresh_process_makes_the_trained_policys_images(build, tiny_sd3_dir, tmp_path):
    policy = build(ema=False)
    _randomise(policy.parameters)
    folder = _write(policy, tmp_path)
    code = f"""
import sys, torch
sys.path[:0] = {[p for p in sys.path if p.endswith("tests")]!r}
from test_lora import _images, _stock
pipeline = _stock({tiny_sd3_dir!r})
base = _images(pipeline)
pipeline.load_lora_weights({folder!r})
assert pipeline.get_list_adapters() == {{"transformer": ["default_0"]}}
torch.save([base, _images(pipeline)], {str(tmp_path / "images.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    base, loaded = torch.load(tmp_path / "images.pt")
    trained = _images(policy.model.pipeline)
    torch.testing.assert_close(loaded, trained, rtol=0, atol=1e-5)
    assert (loaded - base).abs().max() > CHANGED


def test_an_export_holds_the_average_where_there_is_one(build, tmp_path):
    policy = build(ema=True)
    _randomise(policy.ema.tensors)
    folder = _write(policy, tmp_path)
    with policy.weights("ema"):
        average = _current(policy)
    again = build(lora_path=folder, ema=False)
    torch.testing.assert_close(_current(again), average, rtol=0, atol=1e-5)
    assert (_current(policy) - average).abs().max() > CHANGED


@pytest.mark.parametrize("place", ["lora", "lora/pytorch_lora_weights.safetensors", ""])
def test_a_warm_start_is_the_exported_policy(build, tmp_path, place):
    policy = build(ema=False)
    _randomise(policy.parameters)
    _write(policy, tmp_path)
    again = build(lora_path=str(tmp_path / place), lora_alpha=5)
    torch.testing.assert_close(_current(again), _current(policy), rtol=0, atol=1e-5)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in again.parameters)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "lora_alpha": 8},
        {"alpha_pattern": {"to_q": 8}},
    ],
    ids=["alpha", "rslora", "alpha_pattern"],
)
def test_a_peft_folder_keeps_its_strength(build, peft_folder, tiny_sd3_dir, settings):
    folder, wanted = peft_folder(**settings)
    policy = build(lora_path=folder, lora_rank=32, lora_alpha=16)
    torch.testing.assert_close(_current(policy), wanted, rtol=0, atol=1e-5)
    pipeline = _stock(tiny_sd3_dir)
    base = SD3(_stock(tiny_sd3_dir), "cpu", max_sequence_length=0)
    # 2 blocks x 8 projections, less the last block's attn.to_add_out
    assert lora.attach(pipeline, folder) == 15
    model = SD3(pipeline, "cpu", max_sequence_length=0)
    torch.testing.assert_close(_velocity(pipeline.transformer, model), wanted, rtol=0, atol=1e-5)
    assert (_velocity(base.transformer, base) - wanted).abs().max() > CHANGED


def test_modules_of_other_ranks_keep_their_strength(peft_folder, tiny_sd3_dir):
    folder, wanted = peft_folder(r=8, lora_alpha=4, rank_pattern={"to_k": 2})
    pipeline = _stock(tiny_sd3_dir)
    lora.attach(pipeline, folder)
    model = SD3(pipeline, "cpu", max_sequence_length=0)
    torch.testing.assert_close(_velocity(pipeline.transformer, model), wanted, rtol=0, atol=1e-5)


def test_a_diffusers_file_with_metadata_keeps_its_strength(build, tiny_sd3_dir, tmp_path):
    policy = build()
    _randomise(policy.parameters)
    transformer = policy.model.transformer
    StableDiffusion3Pipeline.save_lora_weights(
        str(tmp_path),
        # alpha not folded in
        transformer_lora_layers={k: p.detach() for k, p in lora.state(transformer).items()},
        transformer_lora_adapter_metadata=transformer.peft_config[lora.ADAPTER].to_dict(),
    )
    again = build(lora_path=str(tmp_path), lora_alpha=7)
    torch.testing.assert_close(_current(again), _current(policy), rtol=0, atol=1e-5)
    pipeline = _stock(tiny_sd3_dir)
    lora.attach(pipeline, str(tmp_path))
    images = _images(policy.model.pipeline)
    torch.testing.assert_close(_images(pipeline), images, rtol=0, atol=1e-5)


def test_another_rank_names_the_rank_to_set(build, peft_folder):
    folder, _ = peft_folder()
    with pytest.raises(ValueError, match=r"set train.lora_rank to the file's rank \(32\)"):
        build(lora_path=folder, lora_rank=16)


def test_an_adapter_of_another_model_is_an_error(build, tiny_sd3_dir, tmp_path):
    save_file(
        {"transformer.blocks.0.proj.lora_A.weight": torch.zeros(2, 3),
         "transformer.blocks.0.proj.lora_B.weight": torch.zeros(3, 2)},
        tmp_path / lora.DIFFUSERS_FILE,
    )  # fmt: skip
    with pytest.raises(ValueError, match="none of its 2 tensors belongs to this adapter"):
        build(lora_path=str(tmp_path))
    with pytest.raises(ValueError, match=r"1 of its 1 modules are not in this model.*blocks\.0"):
        lora.attach(_stock(tiny_sd3_dir), str(tmp_path))


def test_an_adapter_of_another_width_is_an_error(build, peft_folder, tiny_sd3_dir, tmp_path):
    folder, _ = peft_folder(target_modules=["attn.to_q"])
    with pytest.raises(ValueError, match=r"4 of its 4 tensors match the 30.*other target modules"):
        build(lora_path=folder, lora_rank=32)
    shutil.copytree(folder, tmp_path / "wide")
    file = tmp_path / "wide" / lora.PEFT_FILE
    wide = {
        key: torch.cat([t, t], 1 if "lora_A" in key else 0) for key, t in load_file(file).items()
    }
    save_file(wide, file)
    with pytest.raises(ValueError, match="another size of this model"):
        lora.attach(_stock(tiny_sd3_dir), str(tmp_path / "wide"))


def test_what_is_no_adapter_is_an_error(tmp_path, peft_folder):
    with pytest.raises(ValueError, match="holds no adapter: expected pytorch_lora_weights"):
        lora.read(str(tmp_path))
    (tmp_path / lora.DIFFUSERS_FILE).write_bytes(b"half a file")
    with pytest.raises(ValueError, match="no valid safetensors file"):
        lora.read(str(tmp_path))
    folder, _ = peft_folder()
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(f"{folder}/{lora.PEFT_FILE}", bare)
    with pytest.raises(ValueError, match=r"no adapter_config\.json: the strength is unknown"):
        lora.read(str(bare))
    (bare / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="no valid JSON"):
        lora.read(str(bare))


def test_a_rank_below_1_is_an_error(build):
    with pytest.raises(ValueError, match=r"train.lora_rank \(0\) must be at least 1"):
        build(lora_rank=0)


def test_a_model_card_says_how_to_load_the_adapter(build, tiny_sd3_dir, tmp_path):
    card = (tmp_path / "lora" / "README.md").read_text() if _write(build(), tmp_path) else ""
    assert "base_model_relation: adapter" in card
    assert "pipeline_tag: text-to-image" in card
    assert f'from_pretrained("{tiny_sd3_dir}", text_encoder_3=None, tokenizer_3=None)' in card
    assert "pipe.load_lora_weights(" in card
    assert "ocr (1.0)" in card
    json.dumps(card)
