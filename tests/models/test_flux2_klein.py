"""FLUX.2 klein's adapter: patched latents, a shift of its own, no guidance where distilled."""

import math
import re
from collections import Counter

import pytest
import tiny_flux2
import torch

from config.base import locked_config
from flow_grpo import lora, seeds
from flow_grpo.models.flux2_klein import Flux2Klein

SIZE, LENGTH = (16, 40), 48
SAME = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> Flux2Klein:
    return Flux2Klein(tiny_flux2.flux2_klein(), "cpu", max_sequence_length=LENGTH)


def _settings(folder, **changes):
    config = locked_config()
    config.pretrained.model, config.mixed_precision = str(folder), "no"
    config.sample.max_sequence_length = LENGTH
    config.sample.guidance_scale = config.eval.guidance_scale = 1.0
    config.update_from_flattened_dict(changes)
    return config


def test_images_become_the_latents_that_the_pipeline_makes_of_references(model):
    images = torch.rand(2, 3, *SIZE, generator=seeds.generator(0, seeds.EVAL_NOISE))
    with torch.no_grad():
        x = model.encode_images(images)
        wanted = model.pipeline._encode_vae_image(2 * images - 1, generator=None)
        plain = model.pipeline.vae.encode(2 * images - 1).latent_dist.mean
    assert x.shape == (2, *model.latent_shape(SIZE)) == (2, 16, 2, 5)
    torch.testing.assert_close(x, wanted, **SAME)
    torch.testing.assert_close(model.own_latents(plain), x, **SAME)
    # Channel 3, row 2 * 1 + 0, column 2 * 4 + 1 of the autoencoder's latents.
    norm = model.pipeline.vae.bn
    value = plain[0, 3, 2, 9] - norm.running_mean[3 * 4 + 1]
    value = value / math.sqrt(norm.running_var[3 * 4 + 1] + 1e-4)
    torch.testing.assert_close(x[0, 3 * 4 + 1, 1, 4], value, **SAME)


@pytest.mark.parametrize(("num_steps", "size"), [(4, SIZE), (50, (512, 512))])
def test_the_sigmas_are_shifted_by_size_and_number_of_steps(model, num_steps, size):
    num_tokens = (size[0] // 8) * (size[1] // 8)  # tokens of 2 x 2 latents of 4 x 4 pixels
    # A line through the shifts of 10 and of 200 steps, each a line in the number of tokens.
    ten, many = 8.73809524e-05 * num_tokens + 1.89833333, 0.00016927 * num_tokens + 0.45666666
    shift = math.exp(ten + (many - ten) * (num_steps - 10) / 190)
    linear = torch.linspace(1, 1 / num_steps, num_steps)
    sigmas = model.sigmas(num_steps, size)
    torch.testing.assert_close(sigmas[:-1], shift / (shift + 1 / linear - 1), rtol=0, atol=1e-6)
    assert sigmas[-1] == 0


def test_more_than_4300_tokens_have_a_shift_without_the_number_of_steps(model):
    tokens = (66 * 8, 66 * 8)
    assert torch.equal(model.sigmas(4, tokens)[1], model.sigmas(8, tokens)[2])
    assert not torch.equal(model.sigmas(4, SIZE)[1], model.sigmas(8, SIZE)[2])


def test_guidance_of_a_distilled_model_is_refused(tmp_path):
    tiny_flux2.flux2_klein(is_distilled=True).save_pretrained(tmp_path)
    for section in ("sample", "eval"):
        settings = _settings(tmp_path, **{f"{section}.guidance_scale": 4.0})
        with pytest.raises(
            ValueError, match=rf"{section}.guidance_scale \(4.0\) must be 1 .*disti"
        ):
            Flux2Klein.load(settings, torch.device("cpu"))
    model = Flux2Klein.load(_settings(tmp_path), torch.device("cpu"))
    assert model.pipeline.config.is_distilled


def test_a_base_model_is_guided(tiny_dir):
    settings = _settings(tiny_dir("flux2_klein"), **{"sample.guidance_scale": 4.0})
    assert not Flux2Klein.load(settings, torch.device("cpu")).pipeline.config.is_distilled


def test_the_adapter_has_every_matrix_of_every_block():
    transformer = tiny_flux2.flux2_klein().transformer
    lora.add(transformer, targets=Flux2Klein.lora_targets, rank=2, alpha=4)
    modules = [key.removesuffix(".lora_A.weight") for key in lora.state(transformer) if "_A" in key]
    found = Counter(re.sub(r"\.\d\.", ".", module, count=1) for module in modules)
    matrices = {
        re.sub(r"\.\d\.", ".", name, count=1)
        for name, module in tiny_flux2.flux2_klein().transformer.named_modules()
        if type(module) is torch.nn.Linear and "transformer_blocks." in name
    }
    assert len(matrices) == 14
    assert found == dict.fromkeys(matrices, 2)


@pytest.mark.parametrize(("length", "nearest"), [(30, 32), (0, 8), (36, 32), (500, 496)])
def test_an_invalid_resolution_names_the_nearest_valid_one(model, length, nearest):
    with pytest.raises(ValueError, match=rf"resolution \({length}\).*nearest valid: {nearest}$"):
        model.check_size((length, length))
    model.check_size((nearest, nearest))
