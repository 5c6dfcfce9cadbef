"""scripts/sample.py makes the stock pipeline's images, with any adapter that users have."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import families
import numpy as np
import pytest
import tiny_models
import torch
import yaml
from PIL import Image

from flow_grpo import lora, registry, seeds

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "sample.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("sample_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script, tiny_sd3_dir, tmp_path, monkeypatch, capsys):
    """Return a function that runs the script on the tiny model: (exit code, stdout, stderr)."""

    def call(*arguments: str, base: bool = True):
        fixed = ["--pretrained", tiny_sd3_dir, "--resolution", "32", "--num_steps", "2"]
        monkeypatch.setattr(sys, "argv", ["sample.py", *(fixed if base else []), *arguments])
        monkeypatch.chdir(tmp_path)
        code = script.main()
        return code, *capsys.readouterr()

    return call


def _pixels(folder: Path) -> dict[str, np.ndarray]:
    return {f.name: np.asarray(Image.open(f)).astype(int) for f in sorted(folder.glob("*.png"))}


def _adapter(folder: Path, rank: int = 4) -> Path:
    """Write a random diffusers adapter of the tiny model."""
    pipeline = tiny_models.sd3()
    lora.add(pipeline.transformer, targets=("attn.to_q", "attn.to_v"), rank=rank, alpha=rank)
    with torch.no_grad():
        for place, (name, p) in enumerate(pipeline.transformer.named_parameters()):
            if "lora_" in name:
                p.copy_(seeds.normal(p.shape, 0, seeds.ADAPTER_INIT, member=place))
    pipeline.save_lora_weights(
        str(folder), transformer_lora_layers=lora.export_state(pipeline.transformer)
    )
    return folder


def test_a_command_line_makes_images_and_says_where(tiny_sd3_dir, tmp_path):
    command = [sys.executable, str(SCRIPT), "--pretrained", tiny_sd3_dir, "--resolution", "32"]
    command += ["--num_steps", "2", "--num_images", "2", "--prompt", '"AB"', "--prompt", "b"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    images = _pixels(tmp_path / "out")
    assert list(images) == ["000_00.png", "000_01.png", "001_00.png", "001_01.png"]
    assert {image.shape for image in images.values()} == {(32, 32, 3)}
    assert f"4 images in {tmp_path / 'out'}" in done.stdout


def test_an_image_depends_on_seed_prompt_and_place_only(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n\n  b \n")
    run("--prompt_file", "prompts.txt", "--num_images", "3", "--out", "all")
    run("--prompt", "a", "--prompt", "b", "--num_images", "3", "--batch_size", "2", "--out", "two")
    run("--prompt", "a", "--seed", "1", "--num_images", "3", "--out", "seed")
    whole, parts, other = (_pixels(tmp_path / name) for name in ("all", "two", "seed"))
    assert whole.keys() == parts.keys()
    for name, image in whole.items():
        # a forward of 2 sums in another order than one of 3: a pixel may round the other way
        assert np.abs(image - parts[name]).max() <= 1
    assert np.abs(whole["000_00.png"] - other["000_00.png"]).max() > 10
    assert np.abs(whole["000_00.png"] - whole["000_01.png"]).max() > 10


def test_a_prompt_that_is_given_twice_gives_other_images(run, tmp_path):
    run("--prompt", "a", "--prompt", "a", "--num_images", "1", "--out", "two")
    first, second = _pixels(tmp_path / "two").values()
    assert np.abs(first - second).max() > 10


def test_an_adapter_changes_the_images_in_whatever_form_it_comes(run, script, tmp_path):
    folder = _adapter(tmp_path / "checkpoint-3" / "lora")
    for place, name in (
        (folder, "folder"),
        (folder / lora.DIFFUSERS_FILE, "file"),
        (folder.parent, "checkpoint"),
    ):
        assert run("--prompt", "a", "--lora", str(place), "--out", name)[0] == 0
    run("--prompt", "a", "--out", "base")
    base, *loaded = (_pixels(tmp_path / n) for n in ("base", "folder", "file", "checkpoint"))
    for images in loaded:
        assert all(np.array_equal(images[name], loaded[0][name]) for name in images)
        assert np.abs(images["000_00.png"] - base["000_00.png"]).max() > 10


def test_the_transformer_of_full_training_is_read_too(run, tmp_path):
    tiny_models.sd3(seed=1).transformer.save_pretrained(tmp_path / "checkpoint-3" / "transformer")
    run("--prompt", "a", "--out", "base")
    assert run("--prompt", "a", "--lora", "checkpoint-3", "--out", "full")[0] == 0
    base, full = _pixels(tmp_path / "base"), _pixels(tmp_path / "full")
    assert np.abs(full["000_00.png"] - base["000_00.png"]).max() > 10


def test_what_is_not_given_comes_from_the_run_of_the_adapter(run, tiny_config, tmp_path):
    folder = tmp_path / "runs" / "one"
    _adapter(folder / "checkpoints" / "checkpoint-3" / "lora")
    settings = tiny_config.to_dict()
    settings["resolution"] = 48
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    where = str(folder / "checkpoints" / "checkpoint-3")
    assert run("--prompt", "a", "--lora", where, "--out", "own", base=False)[0] == 0
    assert _pixels(tmp_path / "own")["000_00.png"].shape == (48, 48, 3)
    run("--prompt", "a", "--lora", where, "--resolution", "40", "--out", "given", base=False)
    assert _pixels(tmp_path / "given")["000_00.png"].shape == (40, 40, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt: give --prompt"),
        (("--prompt_file", "missing.txt"), "missing.txt"),
        (("--prompt", "a", "--pretrained", "./none"), "no folder here"),
        (("--prompt", "a", "--lora", "none"), "none does not exist"),
        (("--prompt", "a", "--resolution", "30"), "nearest valid: 32"),
        (("--prompt", "a", "--num_images", "0"), "--num_images (0) must be at least 1"),
        (("--prompt", "a", "--num_steps", "0"), "--num_steps (0) must be at least 1"),
        (("--prompt", "a", "--max_sequence_length", "513"), "must be in [0, 512]"),
        (("--prompt", "a", "--mixed_precision", "fp8"), "must be one of no, fp16, bf16"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert err.strip().count("\n") == 0 or "Loading" in err
    assert out == ""


def test_an_adapter_that_matches_nothing_is_an_error(run, tmp_path):
    from safetensors.torch import save_file

    save_file(
        {f"transformer.blocks.0.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"},
        tmp_path / lora.DIFFUSERS_FILE,
    )
    code, _, err = run("--prompt", "a", "--lora", str(tmp_path))
    assert code == 2
    assert "1 of its 1 modules are not in this model" in err


def _family_arguments(name: str, folder: str, tmp_path: Path) -> list[str]:
    arguments = ["--pretrained", folder, "--resolution", "32", "--width", "48", "--num_steps", "2"]
    arguments += ["--num_frames", "5", "--max_sequence_length", "16", "--num_images", "1"]
    arguments += ["--reference_resolution", "64"]
    most = families.adapter(name).max_images
    for place in range(most):
        Image.new("RGB", (40, 40), (255 * place, 80, 20)).save(tmp_path / f"{place}.png")
        arguments += ["--image", str(tmp_path / f"{place}.png")]
    return arguments


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_family_is_that_of_the_pipeline(name, run, tiny_dir, tmp_path):
    arguments = _family_arguments(name, tiny_dir(name), tmp_path)
    adapter, pipeline = families.adapter(name), families.FAMILIES[name].pipeline()
    lora.add(pipeline.transformer, targets=adapter.lora_targets, rank=2, alpha=2)
    with torch.no_grad():
        for place, (key, p) in enumerate(pipeline.transformer.named_parameters()):
            if "lora_" in key:
                p.copy_(seeds.normal(p.shape, 0, seeds.ADAPTER_INIT, member=place))
    layers = lora.export_state(pipeline.transformer)
    pipeline.save_lora_weights(str(tmp_path / "adapter"), transformer_lora_layers=layers)
    for out, more in (
        ("a", ["--prompt", "a"]),
        ("b", ["--prompt", "of quite another kind, 0123"]),
        ("lora", ["--prompt", "a", "--lora", "adapter"]),
    ):
        code, said, err = run(*arguments, *more, "--out", out, base=False)
        assert code == 0, err
    kind = "webp" if adapter.task == "text-to-video" else "png"
    assert said.startswith(f"1 {'clips' if kind == 'webp' else 'images'} in lora: 000_00.{kind}")
    frames = {}
    for out in ("a", "b", "lora"):
        (file,) = (tmp_path / out).iterdir()
        with Image.open(file) as image:
            assert (file.name, image.size) == (f"000_00.{kind}", (48, 32))
            assert getattr(image, "n_frames", 1) == (5 if kind == "webp" else 1)
            frames[out] = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(frames["a"] - frames["b"]).max() >= 2
    assert np.abs(frames["a"] - frames["lora"]).max() > 5


def test_a_reference_image_counts(run, tiny_dir, tmp_path):
    name = "flux_kontext"
    arguments = [*_family_arguments(name, tiny_dir(name), tmp_path), "--prompt", "a"]
    run(*arguments, "--out", "first", base=False)
    Image.new("RGB", (40, 40), (0, 200, 255)).save(tmp_path / "0.png")
    run(*arguments, "--out", "second", base=False)
    first, second = (_pixels(tmp_path / out)["000_00.png"] for out in ("first", "second"))
    assert np.abs(first - second).max() > 5
    for more, message in (
        (["--image", "0.png"], "--image: FluxKontext takes 1, and 2 were given"),
        (["--image", "none.png"], "--image: FluxKontext takes 1, and 2 were given"),
    ):
        code, _, err = run(*arguments, *more, base=False)
        assert (code, message in err) == (2, True)
    without = [a for a in arguments if a != "--image" and not a.endswith("0.png")]
    assert "takes 1, and 0 were given" in run(*without, base=False)[2]
    (tmp_path / "0.png").write_bytes(b"no image")
    assert "0.png cannot be read" in run(*arguments, base=False)[2]
    assert "SD3 takes no, and 1 were given" in run("--prompt", "a", "--image", "0.png")[2]


def test_a_pipeline_of_no_family_is_an_error(run, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    code, _, err = run("--prompt", "a", "--pretrained", "other", base=False)
    assert code == 2
    assert "other holds a OtherPipeline, which no file of flow_grpo/models is for" in err
    assert "sd3 (StableDiffusion3Pipeline)" in err


@pytest.fixture
def settings_of(script, monkeypatch):
    """Return the function (*arguments) -> the configuration that the script loads a model by."""

    def call(*arguments: str):
        seen, real = [], script.settings

        def settings(args):
            seen.append(real(args)[0])
            raise ValueError("seen")

        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["sample.py", "--prompt", "a", *arguments])
            patch.setattr(script, "settings", settings)
            assert script.main() == 2
        (config,) = seen
        return config

    return call


def test_a_base_model_has_its_familys_settings(settings_of, tiny_dir):
    config = settings_of("--pretrained", tiny_dir("wan2_1"))
    assert (config.resolution, config.width, config.num_frames) == (240, 416, 33)
    assert (config.eval.num_steps, config.sample.max_sequence_length) == (50, 512)
    assert config.pretrained.model == tiny_dir("wan2_1")
    config = settings_of("--pretrained", tiny_dir("wan2_1"), "--resolution", "64")
    assert (config.resolution, config.width) == (64, 0)  # a square


@pytest.mark.parametrize(
    ("gpu", "given", "expected"),
    [(False, (), "no"), (True, (), "bf16"), (False, ("--mixed_precision", "fp16"), "fp16")],
)
def test_the_precision_is_the_familys_on_a_gpu(
    gpu, given, expected, settings_of, tiny_dir, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert settings_of("--pretrained", tiny_dir("flux"), *given).mixed_precision == expected


def test_without_a_model_it_is_the_shipped_one(settings_of):
    config = settings_of("--num_steps", "5", "--guidance_scale", "2")
    assert config.pretrained.model == "flow_grpo/assets/tiny_sd3"
    assert (config.resolution, config.sample.max_sequence_length) == (64, 0)
    assert (config.eval.num_steps, config.eval.guidance_scale) == (5, 2.0)


def test_every_family_has_settings_of_a_base_model(script):
    names = registry.names("flow_grpo.models")
    assert [name for name in names if not hasattr(script.models, name)] == []
