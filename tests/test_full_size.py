"""The benchmark of full size: published sizes, an adapter's dtypes, the preset's own batch."""

import json
import sys
from pathlib import Path

import families
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from config.grpo import get_config

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import attention_gradients
import full_size
import true_pipelines

# Parameters in millions, as published or counted by others.
PUBLISHED = {
    ("sd3", "transformer"): 2243,
    ("sd3", "text_encoder"): 123.65,
    ("sd3", "text_encoder_2"): 694.66,
    ("sd3", "text_encoder_3"): 4762,
    ("sd3", "vae"): 83.82,
    ("flux", "transformer"): 11901,
    ("qwenimage", "transformer"): 20430,
    ("qwenimage", "text_encoder"): 8292,
    ("wan2_1", "transformer"): 1419,
    ("wan2_1", "text_encoder"): 5681,
    ("wan2_1", "vae"): 126.9,
}


@pytest.mark.parametrize(("family", "part"), PUBLISHED)
def test_true_models_have_the_published_number_of_parameters(family, part):
    count = true_pipelines.count(true_pipelines.PARTS[family][part]) / 1e6
    assert count == pytest.approx(PUBLISHED[family, part], rel=5e-4)


def dtypes(pipeline) -> dict[str, torch.dtype]:
    return {
        f"{part}.{name}": tensor.dtype
        for part, module in pipeline.components.items()
        if isinstance(module, nn.Module)
        for tensors in (module.named_parameters(), module.named_buffers())
        for name, tensor in tensors
    }


@pytest.mark.parametrize(
    ("family", "precision"), [*((name, "bf16") for name in true_pipelines.PARTS), ("sd3", "fp16")]
)
def test_pipelines_in_memory_have_the_dtypes_that_load_gives(family, precision, tiny_dir):
    config = families.settings(family, tiny_dir(family), mixed_precision=precision)
    loaded = families.adapter(family).load(config, torch.device("cpu")).pipeline
    parts, half = true_pipelines.tiny_parts(family), full_size.half_precision_dtype(precision)
    drawn = true_pipelines.pipeline(family, parts, half, "cpu")
    assert dtypes(drawn) == dtypes(loaded)
    assert half in dtypes(drawn).values()
    assert type(drawn) is type(loaded)


def test_prompts_have_as_many_tokens_as_the_text_encoders_take():
    parts = true_pipelines.tiny_parts("flux")
    config = parts["text_encoder"]().config
    config.max_position_embeddings = 40
    drawn = true_pipelines.pipeline("flux", parts, torch.bfloat16, "cpu")
    assert drawn.tokenizer.model_max_length == drawn.tokenizer_max_length == 40


@pytest.mark.parametrize(
    ("preset", "gpus", "groups", "size"),
    [
        ("general_ocr_sd3_1gpu", 1, 1, 8),
        ("general_ocr_sd3", 32, 1, 9),
        ("general_ocr_sd3", 48, 1, 8),  # 24 a GPU
        ("pickscore_flux_8gpu", 8, 1, 3),  # 144 a GPU: batches of 3, parts of groups of 24
        ("pickscore_qwenimage_8gpu", 8, 1, 4),
        ("general_ocr_wan2_1", 1, 2, 4),  # a batch of 8 is two groups
        ("counting_flux_kontext", 28, 1, 2),
    ],
)
def test_an_epoch_is_one_batch_of_the_preset(preset, gpus, groups, size):
    config = get_config(preset)
    full_size.one_batch(config, gpus)
    assert (config.sample.groups_per_epoch, config.sample.group_size) == (groups, size)
    assert config.sample.batch_size == groups * size
    assert (config.train.updates_per_epoch, config.train.learning_rate) == (1, 0)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Return a function that measures a tiny pipeline: the lines by what they are about."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.chdir(Path(__file__).resolve().parents[1])

    def run(preset: str, gpus: int, *arguments: str) -> dict[str, list[dict]]:
        out, config = tmp_path / "out.jsonl", f"--config=config/grpo.py:{preset}"
        given = [str(out), "--tiny", "--repeat=1", f"--gpus={gpus}", config, *arguments]
        monkeypatch.setattr(sys, "argv", ["full_size.py", *given])
        try:
            full_size.main()
        finally:
            lines = [json.loads(line) for line in out.read_text().splitlines()]
            assert {line["preset"] for line in lines} == {preset}
            found = {what: [] for what in dict.fromkeys(line["what"] for line in lines)}
            for line in lines:
                found[line["what"]].append(line)
            run.lines = found
        return found

    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield run
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    AcceleratorState._reset_state(reset_partial_state=True)


TINY = ("--config.resolution=32", "--config.sample.max_sequence_length=32")


def test_a_preset_of_clips_is_measured(measured):
    clips = ("--config.width=32", "--config.num_frames=5", "--config.sample.num_steps=4")
    lines = measured("general_ocr_wan2_1", 1, *TINY, *clips)
    assert list(lines) == [
        "machine", "weights", "encode", "operations", "held", "velocity", "rollout", "reward",
        "update",
    ]  # fmt: skip
    (encode,) = lines["encode"]
    assert encode["bytes_of_a_prompt"] == encode["bytes_of_the_negative"] == 32 * 32 * 2  # bf16
    (velocity,) = lines["velocity"]
    assert velocity["batch"] == 8
    assert velocity["max_difference"] <= 1e-2 * velocity["rms"]
    (rollout,) = lines["rollout"]
    assert (rollout["samples"], rollout["steps"]) == (8, 4)
    # Of 3 trained steps: x, x_next and the reference's velocity of 4 x 2 x 8 x 8, a log-prob.
    assert rollout["kept_gib"] == pytest.approx(8 * 3 * (3 * 512 + 1) * 4 / 2**30, rel=1e-4)
    preset, single, offloaded, other = lines["update"]
    assert [line["trained_steps"] for line in lines["update"]] == [3, 2, 2, 2]
    assert [line["batch"] for line in lines["update"]] == [8, 1, 8, 8]
    assert [line["checkpointing"] for line in lines["update"]] == [True, True, True, False]
    assert preset["ratio_dev_first"] == offloaded["ratio_dev_first"] == 0
    assert single["ratio_dev_first"] < 1e-4
    assert offloaded["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    assert preset["grad_norm"] > 0
    assert preset["kl"] > 0, "the adapter must do something"


def test_a_preset_that_edits_is_measured(measured):
    lines = measured("counting_flux_kontext", 28, *TINY, "--config.sample.num_steps=3")
    assert "reference" in lines["encode"][0]["shapes"]
    assert lines["encode"][0]["bytes_of_the_negative"] == 0
    assert [line["samples"] for line in lines["rollout"]] == [2]
    assert lines["update"][0]["ratio_dev_first"] == 0
    assert not lines["weights"][0]["cudnn_attention"]


def test_what_ends_a_run_is_written(measured):
    with pytest.raises(ValueError, match="multiple of 8"):
        measured("general_ocr_wan2_1", 1, "--config.resolution=33", "--config.num_frames=5")
    assert "multiple of" in measured.lines["error"][0]["text"]


def test_a_family_whose_true_size_is_not_known_is_refused(monkeypatch, tmp_path, capsys):
    config = "--config=config/grpo.py:general_ocr_zimage"
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    monkeypatch.setattr(sys, "argv", ["full_size.py", str(tmp_path / "out"), "--gpus=8", config])
    with pytest.raises(SystemExit):
        full_size.main()
    assert "the true size of zimage is not in true_pipelines.py" in capsys.readouterr().err


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", attention_gradients.ORDERS)
def test_attentions_gradients_are_compared(masked, order, monkeypatch, capsys):
    shape = (2, 300, 2, 16, torch.bfloat16, masked)
    monkeypatch.setattr(attention_gradients, "DEVICE", "cpu")
    monkeypatch.setitem(attention_gradients.SHAPES, "small", shape)
    cudnn, kernels = torch.backends.cuda.cudnn_sdp_enabled(), []
    wrong = {"slice": 1.5}  # cuDNN's, as it were

    def backward(self, layout, *, cudnn):
        kernels.append(cudnn)
        found = original(self, layout, cudnn=cudnn)
        return [x * wrong.get(layout, 1.0) for x in found] if cudnn else found

    original = attention_gradients.Problem.backward
    monkeypatch.setattr(attention_gradients.Problem, "backward", backward)
    attention_gradients.compare("small", order)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    errors = {"contiguous": "0", "slice": "0.5"}
    assert capsys.readouterr().out.splitlines() == [
        f"small: {layout} gradient: relative error {errors[layout]}" for layout in order
    ]
    assert kernels == [False, True] * 2
