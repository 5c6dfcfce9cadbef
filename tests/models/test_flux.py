"""What is FLUX.1's own: a shift by tokens, a guidance embedding, time that is rounded once."""

import math

import families
import pytest
import tiny_flux
import torch
from diffusers import FluxPipeline

from flow_grpo import seeds
from flow_grpo.models import flux
from flow_grpo.models.base import Cond
from flow_grpo.models.flux import Flux
from flow_grpo.models.tokens import pack, unpack

SIZE, LENGTH = (32, 32), 48
PROMPTS = ['"AB" on a red sign', 'the word "CDE"']
SAME = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> Flux:
    return Flux(tiny_flux.flux(), "cpu", max_sequence_length=LENGTH)


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, 4, 4, 16), 0, seeds.INITIAL_NOISE)


@torch.no_grad()
def _cond(model: Flux, prompts=PROMPTS) -> Cond:
    return model.encode(model.transformer, prompts, size=SIZE, negative=None)


@torch.no_grad()
def _velocity(model: Flux, x, sigma, cond, scale: float = 3.5) -> torch.Tensor:
    return model.velocity(model.transformer, x, sigma, cond, scale)


def test_a_model_without_guidance_embedding_is_told_none():
    model = Flux(tiny_flux.flux(guidance_embeds=False), "cpu", max_sequence_length=LENGTH)
    x, sigma, cond = _noise(), torch.tensor([0.9, 0.4]), _cond(model)
    velocity = _velocity(model, x, sigma, cond, 1.0)
    assert torch.equal(_velocity(model, x, sigma, cond, 3.5), velocity)
    settings = {"size": SIZE, "num_steps": 1, "guidance_scale": 1.0}
    wanted = families.unpatched("flux", model.pipeline, PROMPTS, x, **settings)
    one = torch.ones(2)  # a single step of the ODE, from sigma 1 to 0
    torch.testing.assert_close(x - _velocity(model, x, one, cond, 1.0), wanted, **SAME)


def test_tokens_and_their_places_are_the_pipelines():
    latents = seeds.normal((3, 4, 4, 10), 0, seeds.INITIAL_NOISE)
    grid = pack(latents)
    assert grid.shape == (3, 2, 5, 16)
    assert torch.equal(grid.flatten(1, 2), FluxPipeline._pack_latents(latents, 3, 4, 4, 10))
    assert torch.equal(unpack(grid), latents)
    ids = FluxPipeline._prepare_latent_image_ids(3, 2, 5, "cpu", torch.float32)
    assert torch.equal(flux.position_ids(grid), ids)
    assert torch.equal(flux.position_ids(grid, image=1) - ids, torch.tensor([[1.0, 0, 0]] * 10))


def test_sigmas_are_shifted_by_the_number_of_tokens(model):
    # 16 image tokens: mu = .5 + (1.15 - .5) * (16 - 256) / (4096 - 256) = .459375, and a sigma s
    # of the linear schedule 1 ... 1/6 becomes exp(mu) / (exp(mu) + 1 / s - 1).
    linear, shift = torch.linspace(1, 1 / 6, 6), math.exp(0.459375)
    sigmas = model.sigmas(6, SIZE)
    torch.testing.assert_close(sigmas[:-1], shift / (shift + 1 / linear - 1), rtol=0, atol=1e-6)
    assert (model.sigmas(6, (64, 64)) - sigmas).abs().max() > 1e-3


def test_sigmas_at_512_px_are_the_published_ones(model):
    # The tiny autoencoder shrinks by 4 where the real one does by 8: 256 px have the 1024 tokens.
    sigmas = model.sigmas(6, (256, 256))
    published = torch.tensor([1, 0.9037, 0.7897, 0.6525, 0.4842, 0.2730, 0])
    torch.testing.assert_close(sigmas, published, rtol=0, atol=5e-5)


def test_the_prompts_summary_and_the_place_of_a_token_matter(model):
    x, sigma, cond = _noise(), torch.full((2,), 0.7), _cond(model)
    pooled = cond["pooled_prompt_embeds"].flip(0)
    summary = Cond({**cond.tensors, "pooled_prompt_embeds": pooled})
    velocity = _velocity(model, x, sigma, cond)
    others = {
        "summary": _velocity(model, x, sigma, summary),
        "place": _velocity(model, x.flip(2), sigma, cond).flip(2),
    }
    for name, other in others.items():
        per_sample = (other - velocity).square().flatten(1).mean(1).sqrt()
        assert (per_sample > 1e-2).all(), (name, per_sample)


def test_time_is_rounded_once_and_the_same_way_every_time():
    """Hold the time embedding's input, in bf16, to sigma's nearest, times 1000."""
    pipeline = tiny_flux.flux()
    pipeline.transformer.to(torch.bfloat16)
    model, seen = Flux(pipeline, "cpu", max_sequence_length=LENGTH), []
    pipeline.transformer.time_text_embed.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    sigma, cond = torch.tensor([0.2730, 0.7897]), _cond(model)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            model.velocity(model.transformer, _noise(), sigma, cond, 3.5)
    assert torch.equal(seen[0], seen[1])
    # .2730 -> .2734375 (bf16 has steps of 1/512 there), .7897 -> .7890625, and 1000 times that is
    # 273.4 -> 274 (steps of 2), 789.06 -> 788 or 792 (steps of 4): 788.
    assert seen[0].tolist() == [274.0, 788.0]


def test_guidance_for_a_model_that_cannot_hear_of_it_is_an_error(tmp_path):
    tiny_flux.flux(guidance_embeds=False).save_pretrained(tmp_path)
    off = {f"{section}.guidance_scale": 1.0 for section in ("sample", "eval")}
    Flux.load(families.settings("flux", str(tmp_path), **off), torch.device("cpu"))
    for key in off:
        config = families.settings("flux", str(tmp_path), **{**off, key: 3.5})
        with pytest.raises(ValueError, match=rf"{key} \(3.5\) must be 1"):
            Flux.load(config, torch.device("cpu"))


def test_the_adapter_reaches_every_target_of_every_block(adapter_modules):
    found, unused = adapter_modules("flux")
    double = {f"transformer_blocks.{i}.{t}" for i in range(2) for t in Flux.lora_targets}
    # A single block has neither projections of the text nor a feed-forward part of that name.
    single = {
        f"single_transformer_blocks.{i}.attn.{t}"
        for i in range(2)
        for t in ("to_k", "to_q", "to_v")
    }
    assert found == double | single
    assert len(found) == 2 * 12 + 2 * 3
    assert unused == set()
