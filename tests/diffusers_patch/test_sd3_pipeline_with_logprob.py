"""The pipeline that people import equals the adapter's rollout, and the stock one without noise."""

import pytest
import tiny_models
import torch

from flow_grpo import seeds
from flow_grpo.diffusers_patch.sd3_pipeline_with_logprob import pipeline_with_logprob
from flow_grpo.models.sd3 import SD3
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory
from flow_grpo.schedules import sde_window
from flow_grpo.sde import SDES

SIZE = (32, 32)
PROMPTS = ['"AB" on a red sign', 'the word "CDE"']
SAME = {"rtol": 0.0, "atol": 1e-5}
NUM_STEPS = 6


@pytest.fixture(scope="module")
def model():
    return SD3(tiny_models.sd3(), "cpu", max_sequence_length=0)


def _call(model, **settings):
    settings = {"output_type": "latent", "guidance_scale": 1.0, **settings}
    return pipeline_with_logprob(
        model.pipeline,
        PROMPTS,
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=NUM_STEPS,
        latents=seeds.normal((2, 4, 8, 8), 0, seeds.INITIAL_NOISE),
        max_sequence_length=0,
        **settings,
    )


def _rollout(model, guidance_scale: float, sde_type: str, noise_level: float, window: tuple):
    """Sample by the adapter and the core, with the noise that the global generator gives now."""
    cache = PromptCache(model, model.transformer, size=SIZE, negative="", max_size=9)
    cond = cache(PROMPTS, "cpu")

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    return sample_trajectory(
        velocity,
        seeds.normal((2, 4, 8, 8), 0, seeds.INITIAL_NOISE),
        model.sigmas(NUM_STEPS, SIZE),
        sde=SDES[sde_type],
        noise_level=noise_level,
        stochastic=window,
        trained=window,
        noises=torch.stack([torch.randn(2, 4, 8, 8) for _ in window], 1),
    )


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_the_base_form_is_the_adapters_rollout_with_noise_at_every_step(
    model, sde_type, guidance_scale
):
    torch.manual_seed(3)
    image, latents, log_probs, means = _call(
        model,
        noise_level=0.7,
        sde_type=sde_type,
        guidance_scale=guidance_scale,
        return_prev_sample_mean=True,
    )
    torch.manual_seed(3)
    name = {"sde": "flow_sde", "cps": "cps"}[sde_type]
    wanted = _rollout(model, guidance_scale, name, 0.7, tuple(range(NUM_STEPS)))
    assert (len(latents), len(log_probs), len(means)) == (NUM_STEPS + 1, NUM_STEPS, NUM_STEPS)
    torch.testing.assert_close(image, wanted.final, **SAME)
    torch.testing.assert_close(torch.stack(latents[:-1], 1), wanted.latents, **SAME)
    torch.testing.assert_close(torch.stack(latents[1:], 1), wanted.next_latents, **SAME)
    torch.testing.assert_close(torch.stack(log_probs, 1), wanted.log_probs, rtol=0, atol=1e-4)


def test_the_base_form_returns_three_values_unless_asked_for_means(model):
    assert len(_call(model)) == 3


@pytest.mark.parametrize("size", [0, 2])
def test_the_fast_form_is_the_adapters_rollout_with_noise_in_the_window(model, size):
    settings = {"noise_level": 0.8, "sde_type": "cps", "sde_window_range": (1, 5)}
    torch.manual_seed(4)
    image, latents, log_probs, timesteps = _call(model, sde_window_size=size, **settings)
    torch.manual_seed(4)
    window = sde_window(NUM_STEPS, size, (1, 5), generator=torch.default_generator)
    wanted = _rollout(model, 1.0, "cps", 0.8, window)
    torch.testing.assert_close(image, wanted.final, **SAME)
    assert (len(latents), len(log_probs)) == (len(window) + 1, len(window))
    torch.testing.assert_close(torch.stack(latents[1:], 1), wanted.next_latents, **SAME)
    torch.testing.assert_close(torch.stack(log_probs, 1), wanted.log_probs, **SAME)
    assert [t.shape for t in timesteps] == [(2,)] * len(window)
    times = torch.stack(timesteps, 1)[0] / 1000
    torch.testing.assert_close(times, model.sigmas(NUM_STEPS, SIZE)[list(window)])


@pytest.mark.parametrize("sde_type", ["sde", "cps"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_without_noise_it_is_the_stock_pipeline(model, sde_type, guidance_scale):
    settings = {"guidance_scale": guidance_scale, "output_type": "pt"}
    image, *_ = _call(model, noise_level=0.0, sde_type=sde_type, **settings)
    stock = model.pipeline(
        PROMPTS,
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=NUM_STEPS,
        latents=seeds.normal((2, 4, 8, 8), 0, seeds.INITIAL_NOISE),
        max_sequence_length=0,
        **settings,
    ).images
    torch.testing.assert_close(image, stock, **SAME)


def test_embeddings_and_drawn_latents_serve_in_place_of_texts(model):
    embeds, negative, pooled, negative_pooled = model.pipeline.encode_prompt(
        PROMPTS, None, None, max_sequence_length=0
    )
    images, latents, _ = pipeline_with_logprob(
        model.pipeline,
        prompt_embeds=embeds,
        negative_prompt_embeds=negative,
        pooled_prompt_embeds=pooled,
        negative_pooled_prompt_embeds=negative_pooled,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
    )
    assert [image.size for image in images] == [SIZE, SIZE]
    wanted = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(latents[0], wanted)


def test_a_window_outside_the_steps_is_an_error(model):
    with pytest.raises(ValueError, match="window range"):
        _call(model, sde_window_size=2, sde_window_range=(0, 9))
