"""What is FLUX.1-Kontext's own: the tokens of an image to edit, and runs on such images."""

import pytest
import tiny_flux
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from flow_grpo import seeds, trainer
from flow_grpo.models import flux
from flow_grpo.models.flux_kontext import FluxKontext
from flow_grpo.models.tokens import pack
from flow_grpo.prompt_cache import PromptCache

SIZE, LENGTH = (32, 32), 32
SAME = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> FluxKontext:
    return FluxKontext(tiny_flux.flux_kontext(), "cpu", max_sequence_length=LENGTH)


@torch.no_grad()
def _cond(model: FluxKontext, images, size=SIZE):
    images = [(image,) for image in images]
    return model.encode(model.transformer, ["x"] * len(images), images, size=size, negative=None)


def test_references_of_any_shape_become_as_large_as_the_image_to_make(model):
    images = [tiny_flux.image(0, 64, 20), tiny_flux.image(0, 7, 90)]
    found = _cond(model, images, (16, 40))["reference"]
    assert found.shape == (2, *model.latent_shape((16, 40)))
    processor, vae = model.pipeline.image_processor, model.pipeline.vae
    with torch.no_grad():
        pixels = torch.cat([processor.preprocess(image, 16, 40) for image in images])
        # the tiny autoencoder's shift and scale, by hand: z = x / 1.5 + 0.06
        z = vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(found, pack((z - 0.06) * 1.5), **SAME)


def test_the_places_of_the_references_tokens_are_the_pipelines(model):
    latents = seeds.normal((1, 4, 8, 8), 0, seeds.EVAL_NOISE)
    ids = FluxKontextPipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
    ids[..., 0] = 1  # as `prepare_latents` of the pipeline does
    seen = []

    def run(**given):
        seen.append(given["img_ids"])
        return (given["hidden_states"],)

    cond = _cond(model, [tiny_flux.image(0)])
    model.forward(run, pack(latents), torch.ones(1), cond.tensors, 2.5)
    assert torch.equal(seen[0][16:], ids)
    assert torch.equal(seen[0][:16, 1:], ids[:, 1:])
    assert not seen[0][:16, 0].any()


def test_where_in_the_reference_something_is_matters(model):
    x = seeds.normal((1, *model.latent_shape(SIZE)), 0, seeds.INITIAL_NOISE)
    upright, sigma = tiny_flux.image(0), torch.tensor([0.7])
    images = (upright, upright.transpose(Image.Transpose.ROTATE_90))
    with torch.no_grad():
        velocities = [
            model.velocity(model.transformer, x, sigma, _cond(model, [image]), 2.5)
            for image in images
        ]
    assert (velocities[0] - velocities[1]).square().mean().sqrt() > 2e-3


def test_sigmas_are_those_of_the_image_to_make_alone(model):
    reference = flux.Flux(tiny_flux.flux(), "cpu", max_sequence_length=LENGTH)
    assert torch.equal(model.sigmas(6, SIZE), reference.sigmas(6, SIZE))


def test_a_prompt_is_cached_with_the_content_of_its_image(model, tmp_path):
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for path, seed in zip(paths, (0, 0, 1), strict=True):  # a and b are the same picture
        tiny_flux.image(seed).save(path)
    cache = PromptCache(model, model.transformer, size=SIZE, negative=None, max_size=9)
    cond = cache(["x"] * 3 + ["y"], "cpu", [(path,) for path in (*paths, paths[0])])
    assert cache.num_encoded == 3
    latents = cond["reference"]
    assert torch.equal(latents[0], latents[1])
    assert torch.equal(latents[0], latents[3])
    assert (latents[0] - latents[2]).abs().mean() > 1e-2
    cache(["y", "x"], "cpu", [(paths[1],), (paths[2],)])
    assert cache.num_encoded == 3


@pytest.fixture
def kontext_config(tiny_config, tiny_flux_kontext_dir, edit_set, monkeypatch):
    """Return the tiny configuration for the tiny FLUX.1-Kontext and a set to edit."""
    monkeypatch.syspath_prepend("tests")
    monkeypatch.setattr(trainer, "write_report", lambda *args: None)  # it takes longer than a run
    config = tiny_config
    config.pretrained.model = tiny_flux_kontext_dir
    config.dataset, config.prompt_fn = str(edit_set), "geneval"
    config.reward_fn = {"odd_rewards:Contrast": 1.0}
    config.sample.guidance_scale = config.eval.guidance_scale = 2.5
    config.sample.max_sequence_length = LENGTH
    config.num_epochs, config.train.learning_rate = 1, 3e-2
    return config


def test_rewards_are_given_the_references_as_their_files_have_them(
    kontext_config, make_run, monkeypatch
):
    run = make_run(kontext_config, FluxKontext)
    given, submit = [], run.rewards.submit

    def keeping(samples, **names):
        given.append(samples)
        return submit(samples, **names)

    monkeypatch.setattr(run.rewards, "submit", keeping)
    trainer.train(run)
    shapes = {tuple(image.shape) for samples in given for (image,) in samples.reference_images}
    assert shapes == {(3, 32, 32), (3, 32, 48), (3, 40, 20)}


def test_text_encoders_leave_once_every_edit_is_encoded(kontext_config, make_run):
    kontext_config.sample.offload_text_encoders = True
    kontext_config.sample.prompt_cache_size = 1
    run = make_run(kontext_config, FluxKontext)
    assert run.prompt_cache.num_encoded == 12
    trainer.train(run)
    assert run.prompt_cache.num_encoded == 12


def test_the_adapter_reaches_the_feed_forward_part_of_single_blocks(adapter_modules):
    found, unused = adapter_modules("flux_kontext")  # the policy has probed with a blank image
    single = {key.partition("1.")[2] for key in found if key.startswith("single_") and ".1." in key}
    assert single == {"proj_mlp", "attn.to_k", "attn.to_q", "attn.to_v"}
    assert unused == set()


def test_prompts_without_images_are_an_error(kontext_config, make_run):
    kontext_config.dataset, kontext_config.prompt_fn = "dataset/tiny_ocr", "general_ocr"
    with pytest.raises(ValueError, match=r"train.txt:1: no reference images, but FluxKontext"):
        make_run(kontext_config, FluxKontext)
