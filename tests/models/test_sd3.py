"""The adapter is the stock pipeline at noise 0, and its conditions belong to one prompt only."""

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


def _length(with_t5: bool) -> int:
    return 16 if with_t5 else 0


def _adapter(with_t5: bool = False) -> SD3:
    return SD3(tiny_models.sd3(with_t5=with_t5), "cpu", max_sequence_length=_length(with_t5))


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, 4, 8, 8), 0, seeds.INITIAL_NOISE)


def _cond(model: SD3, prompts, guidance_scale: float):
    negative = "" if guidance_scale > 1 else None
    cache = PromptCache(model, model.transformer, size=SIZE, negative=negative, max_size=99)
    return cache(prompts, "cpu")


def _sampled(model: SD3, guidance_scale: float, num_steps: int) -> torch.Tensor:
    """Return x_0 by the core's ODE."""
    cond = _cond(model, PROMPTS, guidance_scale)

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    x = model.initial_latents(2, SIZE, _noise())
    return sample_trajectory(velocity, x, model.sigmas(num_steps, SIZE)).final


def _untouched(with_t5: bool):
    """Return a pipeline no adapter has touched, in evaluation mode as from_pretrained leaves it."""
    pipeline = tiny_models.sd3(with_t5=with_t5)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def _stock(pipeline, with_t5: bool, guidance_scale: float, num_steps: int, output_type: str):
    """Return what the pipeline itself gives."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        PROMPTS,
        latents=_noise(),
        height=SIZE[0],
        width=SIZE[1],
        guidance_scale=guidance_scale,
        num_inference_steps=num_steps,
        max_sequence_length=_length(with_t5),
        output_type=output_type,
    ).images


@pytest.mark.parametrize("with_t5", [False, True], ids=["no_t5", "t5"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_without_noise_the_adapter_is_the_unpatched_pipeline(with_t5, guidance_scale):
    model, stock = _adapter(with_t5), _untouched(with_t5)
    final = _sampled(model, guidance_scale, 6)
    wanted = _stock(stock, with_t5, guidance_scale, 6, "latent")
    torch.testing.assert_close(final, wanted, **SAME)
    pixels = _stock(stock, with_t5, guidance_scale, 6, "pt")
    with torch.no_grad():
        torch.testing.assert_close(model.decode(final), pixels, **SAME)
    assert (final - _noise()).abs().mean() > 0.1, "the steps must have moved the latents"


def test_dynamic_shifting_is_the_unpatched_pipelines():
    pipelines = [_untouched(False), _untouched(False)]
    for pipeline in pipelines:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.7, max_shift=1.3, max_image_seq_len=1024
        )
    model = SD3(pipelines[0], "cpu", max_sequence_length=0)
    final = _sampled(model, 1.0, 6)
    torch.testing.assert_close(final, _stock(pipelines[1], False, 1.0, 6, "latent"), **SAME)
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


def test_asking_for_sigmas_leaves_the_pipelines_scheduler_alone():
    model = _adapter()
    model.pipeline.scheduler.set_timesteps(7)
    model.sigmas(4, SIZE)
    assert len(model.pipeline.scheduler.timesteps) == 7


def test_every_input_changes_the_velocity():
    model = _adapter(with_t5=True)
    x, sigma = _noise(), torch.full((2,), 0.7)
    cond = _cond(model, PROMPTS, 4.5)
    swapped = cond.index(torch.tensor([1, 0]))
    with torch.no_grad():
        velocity = model.velocity(model.transformer, x, sigma, cond, 4.5)
        others = {
            "prompt": model.velocity(model.transformer, x, sigma, swapped, 4.5),
            "guidance": model.velocity(model.transformer, x, sigma, cond, 2.0),
            "no guidance": model.velocity(model.transformer, x, sigma, cond, 1.0),
            "sigma": model.velocity(model.transformer, x, sigma - 0.2, cond, 4.5),
            "x": model.velocity(model.transformer, x + 0.1, sigma, cond, 4.5),
        }
    for name, other in others.items():
        per_sample = (other - velocity).square().flatten(1).mean(1).sqrt()
        assert (per_sample > 1e-2).all(), (name, per_sample)


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


@pytest.mark.parametrize("with_t5", [False, True], ids=["no_t5", "t5"])
def test_a_condition_does_not_depend_on_its_batch(with_t5):
    model = _adapter(with_t5)
    several = model.encode(model.transformer, [*PROMPTS, "x"], size=SIZE, negative="")
    for place, prompt in enumerate(PROMPTS):
        alone = model.encode(model.transformer, [prompt], size=SIZE, negative="")
        assert alone.tensors.keys() == several.tensors.keys()
        for name, tensor in alone.tensors.items():
            assert torch.equal(tensor[0], several[name][place]), name


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


@pytest.mark.parametrize(("with_t5", "length"), [(True, 0), (False, -1), (True, 513)])
def test_a_length_that_no_prompt_can_be_padded_to_is_an_error(with_t5, length):
    with pytest.raises(ValueError, match=rf"max_sequence_length \({length}\) must be in"):
        SD3(tiny_models.sd3(with_t5=with_t5), "cpu", max_sequence_length=length)


@pytest.mark.parametrize(("length", "nearest"), [(30, 32), (0, 8), (33, 32), (4000, 64)])
def test_an_invalid_resolution_names_the_nearest_valid_one(length, nearest):
    # patches of 2 x 2 latents of 4 x 4 pixels, 8 positions a side: multiples of 8 up to 64
    model = _adapter()
    with pytest.raises(ValueError, match=rf"resolution \({length}\).*nearest valid: {nearest}$"):
        model.check_size((32, length))
    model.check_size((32, nearest))


def test_images_keep_shape_and_range_through_the_autoencoder():
    model = _adapter()
    images = torch.rand(2, 3, 32, 48, generator=seeds.generator(0, seeds.EVAL_NOISE))
    with torch.no_grad():
        x = model.encode_images(images)
        back = model.decode(x)
    assert x.shape == (2, *model.latent_shape((32, 48)))
    assert back.shape == images.shape
    assert back.dtype == torch.float32
    assert back.min() >= 0
    assert back.max() <= 1


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


def test_prompts_are_encoded_the_same_after_the_encoders_left_the_device():
    model = _adapter(with_t5=True)
    before = model.encode(model.transformer, PROMPTS, size=SIZE, negative="")
    model.offload_text_encoders()
    assert {p.device.type for p in model.pipeline.text_encoder.parameters()} == {"cpu"}
    after = model.encode(model.transformer, PROMPTS, size=SIZE, negative="")
    assert all(torch.equal(after[name], before[name]) for name in before.tensors)


def test_frozen_parts_need_no_gradient_and_are_in_evaluation_mode():
    model = _adapter(with_t5=True)
    pipeline = model.pipeline
    parts = (pipeline.vae, pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_3)
    for part in parts:
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())
