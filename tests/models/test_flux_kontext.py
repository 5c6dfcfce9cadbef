"""FLUX.1-Kontext's adapter is the stock pipeline at noise 0, and edits the image it is given."""

import re

import pytest
import tiny_flux
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from flow_grpo import seeds, trainer
from flow_grpo.models import flux
from flow_grpo.models.flux_kontext import FluxKontext
from flow_grpo.policy import Policy
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory

SIZE = (32, 32)
PROMPTS = ["make it red", "two apples"]
IMAGES = [tiny_flux.image(0), tiny_flux.image(1)]
LENGTH = 32
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}


def _adapter() -> FluxKontext:
    return FluxKontext(tiny_flux.flux_kontext(), "cpu", max_sequence_length=LENGTH)


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, 4, 8, 8), 0, seeds.INITIAL_NOISE)


def _cond(model: FluxKontext, prompts=PROMPTS, images=IMAGES, size=SIZE):
    references = [(image,) for image in images]
    return model.encode(model.transformer, prompts, references, size=size, negative=None)


def _sampled(policy_velocity, model: FluxKontext, num_steps: int = 6) -> torch.Tensor:
    x = model.initial_latents(2, SIZE, _noise())
    return sample_trajectory(policy_velocity, x, model.sigmas(num_steps, SIZE)).final


def _stock(pipeline, guidance_scale: float, output_type: str, images=IMAGES, num_steps: int = 6):
    """Return what the pipeline itself gives."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        images,
        PROMPTS,
        latents=FluxKontextPipeline._pack_latents(_noise(), 2, 4, 8, 8),
        height=SIZE[0],
        width=SIZE[1],
        guidance_scale=guidance_scale,
        num_inference_steps=num_steps,
        max_sequence_length=LENGTH,
        output_type=output_type,
        max_area=SIZE[0] * SIZE[1],
        _auto_resize=False,
    ).images


def _untouched() -> FluxKontextPipeline:
    pipeline = tiny_flux.flux_kontext()
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_without_noise_the_adapter_is_the_unpatched_pipeline(guidance_scale):
    model, stock = _adapter(), _untouched()
    cond = _cond(model)

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    final = _sampled(velocity, model)
    wanted = _stock(stock, guidance_scale, "latent")
    torch.testing.assert_close(flux.pack(final), wanted, **SAME)
    with torch.no_grad():
        pixels = _stock(stock, guidance_scale, "pt")
        torch.testing.assert_close(model.decode(final), pixels, **SAME)
    assert (final - _noise()).abs().mean() > 0.1, "the steps must have moved the latents"
    other = _stock(stock, guidance_scale, "latent", images=IMAGES[::-1])
    assert (wanted - other).abs().mean() > 1e-3, "the image must matter to the pipeline"


def test_every_input_changes_the_velocity():
    model = _adapter()
    x, sigma, cond = _noise(), torch.full((2,), 0.7), _cond(model)
    turned = [image.transpose(Image.Transpose.ROTATE_90) for image in IMAGES]
    conds = {
        "prompt": _cond(model, PROMPTS[::-1]),
        "image": _cond(model, images=IMAGES[::-1]),
        "turned image": _cond(model, images=turned),
    }
    with torch.no_grad():
        velocity = model.velocity(model.transformer, x, sigma, cond, 2.5)
        others = {
            name: model.velocity(model.transformer, x, sigma, other, 2.5)
            for name, other in conds.items()
        }
        others["guidance"] = model.velocity(model.transformer, x, sigma, cond, 1.0)
        others["sigma"] = model.velocity(model.transformer, x, sigma - 0.2, cond, 2.5)
        others["x"] = model.velocity(model.transformer, x + 0.1, sigma, cond, 2.5)
    for name, other in others.items():
        per_sample = (other - velocity).square().flatten(1).mean(1).sqrt()
        assert (per_sample > 3e-3).all(), (name, per_sample)


def test_a_condition_does_not_depend_on_its_batch():
    model = _adapter()
    several = _cond(model)
    for place in range(2):
        alone = _cond(model, PROMPTS[place : place + 1], IMAGES[place : place + 1])
        assert alone.tensors.keys() == several.tensors.keys()
        for name, tensor in alone.tensors.items():
            assert torch.equal(tensor[0], several[name][place]), name


def test_each_samples_velocity_is_its_own():
    model, x, sigma = _adapter(), _noise(), torch.tensor([0.9, 0.4])
    cond = _cond(model)
    with torch.no_grad():
        both = model.velocity(model.transformer, x, sigma, cond, 2.5)
        for place in range(2):
            rows = slice(place, place + 1)
            alone = model.velocity(model.transformer, x[rows], sigma[rows], cond.index(rows), 2.5)
            torch.testing.assert_close(alone, both[rows], **SAME)


def test_references_of_any_shape_become_as_large_as_the_image_to_make():
    model = _adapter()
    images = [tiny_flux.image(0, 64, 20), tiny_flux.image(0, 7, 90)]
    latents = _cond(model, images=images, size=(16, 40))["reference_latents"]
    assert latents.shape == (2, *model.latent_shape((16, 40)))
    with torch.no_grad():
        resized = model.pipeline.image_processor.preprocess(images[1], 16, 40)
        alone = model.encode_images(resized / 2 + 0.5)
    torch.testing.assert_close(latents[1:], alone, **SAME)


def test_sigmas_are_those_of_the_image_to_make_alone():
    reference = flux.Flux(tiny_flux.flux(), "cpu", max_sequence_length=LENGTH)
    assert torch.equal(_adapter().sigmas(6, SIZE), reference.sigmas(6, SIZE))


def test_a_prompt_is_cached_with_the_content_of_its_image(tmp_path):
    model = _adapter()
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path, seed in zip(paths, (0, 0, 1), strict=True):  # a and b are the same picture
        tiny_flux.image(seed).save(path)
    cache = PromptCache(model, model.transformer, size=SIZE, negative=None, max_size=9)
    cond = cache(["x"] * 3 + ["y"], "cpu", [(path,) for path in (*paths, paths[0])])
    assert cache.num_encoded == 3
    latents = cond["reference_latents"]
    assert torch.equal(latents[0], latents[1])
    assert torch.equal(latents[0], latents[3])
    assert (latents[0] - latents[2]).abs().mean() > 1e-2
    cache(["y", "x"], "cpu", [(paths[1],), (paths[2],)])
    assert cache.num_encoded == 3


@pytest.fixture
def kontext_config(tiny_config, tiny_flux_kontext_dir, edit_set, monkeypatch):
    """Return the tiny configuration for the tiny FLUX.1-Kontext and a set to edit."""
    monkeypatch.syspath_prepend("tests")
    config = tiny_config
    config.pretrained.model = tiny_flux_kontext_dir
    config.dataset, config.prompt_fn = str(edit_set), "geneval"
    config.reward_fn = {"odd_rewards:Contrast": 1.0}
    config.sample.guidance_scale = config.eval.guidance_scale = 2.5
    config.sample.max_sequence_length = LENGTH
    config.train.learning_rate = 3e-2
    return config


def test_a_run_trains_edits_and_its_adapter_gives_the_same_image_in_plain_diffusers(
    kontext_config, make_run, monkeypatch, tiny_flux_kontext_dir
):
    run = make_run(kontext_config, FluxKontext)
    given, submit = [], run.rewards.submit

    def keeping(samples, **names):
        given.append(samples)
        return submit(samples, **names)

    monkeypatch.setattr(run.rewards, "submit", keeping)
    summary = trainer.train(run)
    assert run.state.update == 4
    assert summary["ratio_dev_first_max"] == 0.0
    shapes = {tuple(image.shape) for samples in given for (image,) in samples.reference_images}
    assert shapes == {(3, 32, 32), (3, 32, 48), (3, 40, 20)}
    names = {name.rpartition(".lora_")[0].partition(".")[0] for name in run.policy.names}
    assert names == {"transformer_blocks", "single_transformer_blocks"}
    assert any(".proj_mlp.lora_" in name for name in run.policy.names)
    cond = _cond(run.model)

    def velocity(x, sigma, *, replay):
        return run.policy.velocity(x, sigma, cond, 2.5)

    with torch.no_grad(), run.policy.weights("ema"):
        wanted = run.model.decode(_sampled(velocity, run.model, 4))
    card = (run.folder.checkpoints / "checkpoint-2" / "lora" / "README.md").read_text()
    assert "pipeline_tag: image-to-image" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.S)
    folder, shown = run.folder.checkpoints / "checkpoint-2" / "lora", {}
    file = kontext_config.dataset + "/train/1.png"
    exec(code.replace("THIS FOLDER", str(folder)).replace("IMAGE", file), shown)
    assert shown["image"].size == (32, 32)
    pipeline = FluxKontextPipeline.from_pretrained(tiny_flux_kontext_dir)
    before = _stock(pipeline, 2.5, "pt", num_steps=4)
    assert (before - wanted).abs().max() > 1e-3, "the adapter must matter"
    pipeline.load_lora_weights(run.folder.checkpoints / "checkpoint-2" / "lora")
    torch.testing.assert_close(_stock(pipeline, 2.5, "pt", num_steps=4), wanted, **SAME)


def test_text_encoders_leave_once_every_edit_is_encoded(kontext_config, make_run):
    kontext_config.sample.offload_text_encoders = True
    kontext_config.sample.prompt_cache_size = 1
    run = make_run(kontext_config, FluxKontext)
    assert run.prompt_cache.num_encoded == 12
    trainer.train(run)
    assert run.prompt_cache.num_encoded == 12


def test_a_policy_probes_with_a_blank_image(kontext_config):
    from accelerate import Accelerator

    model = FluxKontext.load(kontext_config, torch.device("cpu"))
    policy = Policy(model, kontext_config, Accelerator(cpu=True))
    assert policy.frozen == []


def test_prompts_without_images_are_an_error(kontext_config, make_run):
    kontext_config.dataset, kontext_config.prompt_fn = "dataset/tiny_ocr", "general_ocr"
    with pytest.raises(ValueError, match=r"train.txt:1: no reference images, but FluxKontext"):
        make_run(kontext_config, FluxKontext)
