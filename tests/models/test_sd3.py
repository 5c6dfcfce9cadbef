"""What is SD3's own: with or without T5, two kinds of shift, a largest size."""

import math

import pytest
import tiny_models
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flow_grpo import seeds
from flow_grpo.models.sd3 import SD3
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory

SIZE = (32, 32)
PROMPTS = ['"AB" on a red sign', 'the word "CDE"']
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}


def _adapter() -> SD3:
    return SD3(tiny_models.sd3(), "cpu", max_sequence_length=0)


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, 4, 8, 8), 0, seeds.INITIAL_NOISE)


@torch.no_grad()
def _cond(model: SD3, prompts, guidance_scale: float):
    negative = "" if guidance_scale > 1 else None
    return model.encode(model.transformer, prompts, size=SIZE, negative=negative)


def _sampled(model: SD3, guidance_scale: float, num_steps: int) -> torch.Tensor:
    """Return x_0 by the core's ODE."""
    cond = _cond(model, PROMPTS, guidance_scale)

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    return sample_trajectory(velocity, _noise(), model.sigmas(num_steps, SIZE)).final


@torch.no_grad()
def _stock(pipeline, guidance_scale: float, num_steps: int) -> torch.Tensor:
    """Return the latents that a pipeline without T5 gives."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS, latents=_noise(), height=SIZE[0], width=SIZE[1], guidance_scale=guidance_scale,
        num_inference_steps=num_steps, max_sequence_length=0, output_type="latent",
    ).images  # fmt: skip


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_without_t5_too_the_adapter_is_the_unpatched_pipeline(guidance_scale):
    final = _sampled(_adapter(), guidance_scale, 6)
    torch.testing.assert_close(final, _stock(tiny_models.sd3(), guidance_scale, 6), **SAME)
    assert (final - _sampled(_adapter(), guidance_scale + 1, 6)).abs().mean() > 1e-3


def test_dynamic_shifting_is_the_unpatched_pipelines():
    pipelines = [tiny_models.sd3(), tiny_models.sd3()]
    for pipeline in pipelines:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.7, max_shift=1.3, max_image_seq_len=1024
        )
    model = SD3(pipelines[0], "cpu", max_sequence_length=0)
    final = _sampled(model, 1.0, 6)
    torch.testing.assert_close(final, _stock(pipelines[1], 1.0, 6), **SAME)
    # 16 image tokens: mu = 0.7 + (1.3 - 0.7) * (16 - 256) / (1024 - 256) = 0.5125, and a sigma s
    # of the linear schedule 1 ... 1/1000 becomes exp(mu) / (exp(mu) + 1 / s - 1).
    linear, shift = torch.linspace(1, 0.001, 6), math.exp(0.5125)
    sigmas = model.sigmas(6, SIZE)
    torch.testing.assert_close(sigmas[:-1], shift / (shift + 1 / linear - 1), rtol=0, atol=1e-6)
    assert sigmas[-1] == 0


def test_sigmas_are_the_schedulers_own():
    model = _adapter()
    sigmas = model.sigmas(10, SIZE)
    torch.testing.assert_close(sigmas[-3:], torch.tensor([0.2780, 0.0089, 0.0]), rtol=0, atol=5e-5)
    assert sigmas[0] == 1
    assert sigmas.dtype == torch.float32
    assert sigmas.shape == (11,)
    # Rebuilt by hand, shift(linspace(1, 0.1, 10)), the last one above 0 would be .25.
    own = FlowMatchEulerDiscreteScheduler.from_config(model.pipeline.scheduler.config)
    own.set_timesteps(10)
    assert torch.equal(sigmas, own.sigmas)


def test_guidance_is_the_weighted_difference_of_two_single_forwards():
    model = _adapter()
    cond = _cond(model, PROMPTS, 3.0)
    negative = _cond(model, ["", ""], 1.0)
    x, sigma = _noise(), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        guided = model.velocity(model.transformer, x, sigma, cond, 3.0)
        positive = model.velocity(model.transformer, x, sigma, cond, 1.0)
        unguided = model.velocity(model.transformer, x, sigma, negative, 1.0)
    torch.testing.assert_close(guided, unguided + 3.0 * (positive - unguided), **SAME)


def test_each_unique_prompt_is_one_forward_and_the_negative_one_for_all(monkeypatch):
    model = _adapter()
    texts = []
    encode_prompt = model.pipeline.encode_prompt

    def counting(prompt, *args, **kwargs):
        texts.append(prompt)
        return encode_prompt(prompt, *args, **kwargs)

    monkeypatch.setattr(model.pipeline, "encode_prompt", counting)
    cache = PromptCache(model, model.transformer, size=SIZE, negative="", max_size=99)
    cache([PROMPTS[0], PROMPTS[1], PROMPTS[0]], "cpu")
    cache([PROMPTS[1]] * 4, "cpu")
    assert sorted(texts) == sorted(["", *PROMPTS])


def test_no_t5_tokens_at_length_0_and_that_many_at_others():
    clip_tokens = tiny_models.MAX_TOKENS
    for with_t5, length in ((False, 0), (False, 8), (True, 16)):
        model = SD3(tiny_models.sd3(with_t5=with_t5), "cpu", max_sequence_length=length)
        embeds = model.encode(model.transformer, ["a", "bb " * 40], size=SIZE, negative=None)
        assert embeds["prompt_embeds"].shape == (2, clip_tokens + length, 32)


def test_no_tokens_for_a_pipeline_with_t5_is_an_error():
    message = r"max_sequence_length \(0\) must be in \[1, 512\].*use_t5=False"
    with pytest.raises(ValueError, match=message):
        SD3(tiny_models.sd3(with_t5=True), "cpu", max_sequence_length=0)


def test_an_image_has_no_more_places_than_the_transformer():
    # patches of 2 x 2 latents of 4 x 4 pixels, 8 positions a side: multiples of 8 up to 64
    with pytest.raises(ValueError, match=r"resolution \(4000\).* at most 64, .*valid: 64$"):
        _adapter().check_size((4000, 4000))


def test_latents_have_the_autoencoders_shift_and_scale():
    model = _adapter()
    images, vae = torch.rand(2, 3, 32, 32), model.pipeline.vae
    with torch.no_grad():
        x = model.encode_images(images)
        # the tiny autoencoder's shift and scale, by hand: z = x / 1.5 + 0.06
        z = vae.encode(2 * images - 1).latent_dist.mean
        torch.testing.assert_close(x / 1.5 + 0.06, z, **SAME)
        pixels = (vae.decode(z).sample + 1) / 2
        torch.testing.assert_close(model.decode(x), pixels.clamp(0, 1), **SAME)


def test_the_adapter_lies_in_the_attention_of_both_streams(adapter_modules):
    found, unused = adapter_modules("sd3")
    parts = SD3.lora_targets
    last = {"transformer_blocks.1.attn.to_add_out"}  # the last block makes nothing of the text
    assert found == {f"transformer_blocks.{i}.{p}" for i in (0, 1) for p in parts} - last
    assert unused == set()
