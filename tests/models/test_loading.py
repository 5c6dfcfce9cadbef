"""A model that cannot be had is one clear line, before anything large is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.utils import set_seed

from config.base import locked_config
from flow_grpo.models.loading import half_precision_dtype, model_index, resolve_model
from flow_grpo.models.sd3 import SD3


def _config(model: str, **changes):
    config = locked_config()
    config.pretrained.model = str(model)
    config.mixed_precision = "no"
    for name, value in changes.items():
        config[name] = value
    return config


def _load(model, **changes) -> SD3:
    return SD3.load(_config(model, **changes), torch.device("cpu"))


def _message(model) -> str:
    with pytest.raises(ValueError) as caught:
        _load(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _folder(tmp_path: Path, index: str) -> Path:
    (tmp_path / "model_index.json").write_text(index)
    return tmp_path


def test_a_missing_folder_is_named(tmp_path):
    missing = tmp_path / "nowhere"
    assert f"'{missing}'" in _message(missing)
    assert "model_index.json" in _message(missing)


def test_a_folder_without_an_index_is_no_pipeline(tmp_path):
    assert "holds no model_index.json" in _message(tmp_path)


def test_a_broken_index_is_no_json(tmp_path):
    assert "no valid JSON" in _message(_folder(tmp_path, '{"_class_name": '))


@pytest.mark.parametrize(
    ("index", "found"),
    [('{"_class_name": "FluxPipeline"}', "FluxPipeline"), ("[1]", "file without _class_name")],
)
def test_another_familys_folder_is_told_apart(tmp_path, index, found):
    message = _message(_folder(tmp_path, index))
    assert f"holds a {found}, not a StableDiffusion3Pipeline" in message


def test_a_hub_id_that_cannot_be_had_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = _message("no-such-owner/no-such-model")
    assert "'no-such-owner/no-such-model'" in message
    assert "local folder" in message


def test_a_folder_that_lacks_its_weights_says_so(tiny_sd3_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_sd3_dir, broken)
    for file in (broken / "transformer").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="a file is missing or broken"):
        _load(broken)


def test_a_folder_is_looked_up_here_and_beside_the_package(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == "mine"
    assert Path(resolve_model("flow_grpo/models")).is_absolute()
    assert resolve_model("owner/name") == "owner/name"


@pytest.mark.parametrize("name", ["./a/b", "/a/b", "a/b/c", "one", "two words/x"])
def test_what_is_neither_folder_nor_hub_id_is_an_error(name):
    with pytest.raises(ValueError, match="no folder here, and no hub id"):
        resolve_model(name)


def test_an_unknown_precision_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'fp8'.*no, fp16, bf16"):
        half_precision_dtype("fp8")


def test_the_index_is_returned_as_it_is(tiny_sd3_dir):
    index = model_index(tiny_sd3_dir, "main", expected="StableDiffusion3Pipeline")
    assert index == json.loads((Path(tiny_sd3_dir) / "model_index.json").read_text())


@pytest.mark.parametrize(
    ("use_lora", "transformer"), [(True, torch.bfloat16), (False, torch.float32)]
)
def test_frozen_parts_are_in_half_precision_and_the_autoencoder_is_not(
    tiny_sd3_dir, use_lora, transformer
):
    model = _load(tiny_sd3_dir, mixed_precision="bf16", use_lora=use_lora)
    assert model.dtype == model.transformer.dtype == transformer
    assert model.pipeline.text_encoder.dtype == torch.bfloat16
    assert model.pipeline.vae.dtype == torch.float32
    set_seed(0)
    cond = model.encode(model.transformer, ["a"], size=(32, 32), negative=None)
    with torch.no_grad():
        velocity = model.velocity(
            model.transformer, torch.randn(1, 4, 8, 8), torch.full((1,), 0.5), cond, 1.0
        )
    assert velocity.dtype == torch.float32
    assert velocity.isfinite().all()


def test_t5_is_left_out_where_it_is_absent_unwanted_or_has_no_tokens(tiny_sd3_dir, tiny_sd3_t5_dir):
    def has_t5(folder, use_t5=True, length=16) -> bool:
        config = _config(folder)
        config.pretrained.use_t5, config.sample.max_sequence_length = use_t5, length
        return SD3.load(config, torch.device("cpu")).pipeline.text_encoder_3 is not None

    assert has_t5(tiny_sd3_t5_dir)
    assert not has_t5(tiny_sd3_t5_dir, use_t5=False)
    assert not has_t5(tiny_sd3_t5_dir, length=0)
    assert not has_t5(tiny_sd3_dir)
