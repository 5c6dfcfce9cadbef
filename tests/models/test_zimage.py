"""Z-Image's adapter turns sign and time, and a sample's numbers do not depend on its batch."""

import math
import re
from collections import Counter

import pytest
import tiny_zimage
import torch

from config.grpo import general_ocr_zimage
from flow_grpo import lora, seeds
from flow_grpo.models.zimage import ZImage

SIZE, LENGTH = (16, 40), 72
# 9, 13 and 56 tokens with the template: filled up to 32, 32 and 64 by the transformer.
PROMPTS = ["a", "a sign", "x" * 48]


@pytest.fixture(scope="module")
def model() -> ZImage:
    return ZImage(tiny_zimage.zimage(), "cpu", max_sequence_length=LENGTH)


def _cond(model: ZImage, prompts):
    with torch.no_grad():
        return model.encode(model.transformer, prompts, size=SIZE, negative="")


def _noise(model: ZImage, num: int) -> torch.Tensor:
    return seeds.normal((num, *model.latent_shape(SIZE)), 0, seeds.INITIAL_NOISE)


class _Recorder(torch.nn.Module):
    """Return what it was given, and remember it."""

    def forward(self, x, t, cap_feats, return_dict):
        self.given = x, t, cap_feats
        return ([sample + 1 for sample in x],)


def test_the_transformer_is_asked_for_data_minus_noise_at_one_minus_sigma(model):
    recorder, x, cond = _Recorder(), _noise(model, 3), _cond(model, PROMPTS)
    tensors = {name: cond[name] for name in ("prompt_embeds", "prompt_mask")}
    velocity = model.forward(recorder, x, torch.tensor([1.0, 0.7, 0.25]), tensors, 1.0)
    assert torch.equal(velocity, -(x + 1))
    latents, time, captions = recorder.given
    torch.testing.assert_close(time[:3], torch.tensor([0.0, 0.3, 0.75]))
    assert {tuple(sample.shape) for sample in latents} == {(4, 1, 4, 10)}
    lengths = [len(caption) for caption in captions]
    assert lengths[:3] == [9, 13, 56]
    # The last one is longer than any prompt, also after both were filled up to multiples of 32.
    assert len(latents) == len(time) == len(captions) == 4
    assert math.ceil(lengths[3] / 32) > math.ceil(LENGTH / 32)


def test_a_samples_numbers_do_not_depend_on_the_other_prompts_of_its_batch(model):
    size = 96, 104  # large enough: without the sample that sets the shape it is 2e-6
    x = seeds.normal((4, *model.latent_shape(size)), 0, seeds.INITIAL_NOISE)
    sigma, mixed = torch.tensor([0.9, 0.7, 0.4, 0.1]), [PROMPTS[i] for i in (0, 2, 1, 2)]
    for partners in ([PROMPTS[0]] * 4, [PROMPTS[0], *[PROMPTS[2]] * 3]):
        velocities = []
        for prompts in (mixed, partners):
            with torch.no_grad():
                cond = _cond(model, prompts)
                velocities.append(model.velocity(model.transformer, x, sigma, cond, 3.0))
        same = [a == b for a, b in zip(mixed, partners, strict=True)]
        assert True in same
        assert False in same
        for first, second, equal in zip(*velocities, same, strict=True):
            assert torch.equal(first, second) == equal


def test_a_longer_fixed_length_changes_nothing_but_rounding(model):
    longer = ZImage(tiny_zimage.zimage(), "cpu", max_sequence_length=4 * LENGTH)
    x, sigma = _noise(model, 3), torch.full((3,), 0.7)
    with torch.no_grad():
        short, long = (
            m.velocity(m.transformer, x, sigma, _cond(m, PROMPTS), 4.0) for m in (model, longer)
        )
    torch.testing.assert_close(short, long, rtol=0, atol=1e-5)


def test_a_prompt_beyond_the_fixed_length_is_cut_as_the_pipeline_cuts_it(model):
    cond = _cond(model, ["q" * 200])
    assert cond["prompt_mask"].all()
    stock = tiny_zimage.zimage()
    stock.text_encoder.eval()
    with torch.no_grad():
        (embeds,), _ = stock.encode_prompt("q" * 200, max_sequence_length=LENGTH)
    torch.testing.assert_close(cond["prompt_embeds"][0], embeds, rtol=0, atol=1e-5)


def test_the_pipelines_own_guidance_counts_from_0(model):
    assert model.stock_settings(1.0) == {"guidance_scale": 0.0}
    assert model.stock_settings(5.0) == {"guidance_scale": 4.0}
    assert model.stock_settings(0.0) == {"guidance_scale": 0.0}
    settings = general_ocr_zimage()
    for section in (settings.sample, settings.eval):
        assert model.stock_settings(section.guidance_scale) == {"guidance_scale": 4.0}


def test_the_sigmas_are_those_of_a_fixed_shift(model):
    linear = torch.linspace(1, 1 / 6, 6)
    sigmas = model.sigmas(6, SIZE)
    torch.testing.assert_close(sigmas[:-1], 3 * linear / (1 + 2 * linear), rtol=0, atol=1e-6)
    assert sigmas[-1] == 0


def test_the_adapter_has_every_matrix_of_attention_and_feed_forward_in_every_block():
    transformer = tiny_zimage.zimage().transformer
    lora.add(transformer, targets=ZImage.lora_targets, rank=2, alpha=4)
    modules = [key.removesuffix(".lora_A.weight") for key in lora.state(transformer) if "_A" in key]
    found = Counter(re.sub(r"^(\w+)\.\d+\.(.*)$", r"\2", module) for module in modules)
    # Two layers, a refiner of noise, one of prompts; not the modulations.
    own = [f"attention.to_{n}" for n in ("k", "out.0", "q", "v")]
    assert found == dict.fromkeys([*own, *(f"feed_forward.w{n}" for n in (1, 2, 3))], 4)


@pytest.mark.parametrize(("length", "nearest"), [(30, 32), (0, 8), (36, 32), (500, 496)])
def test_an_invalid_resolution_names_the_nearest_valid_one(model, length, nearest):
    with pytest.raises(ValueError, match=rf"resolution \({length}\).*nearest valid: {nearest}$"):
        model.check_size((length, length))
    model.check_size((nearest, nearest))
