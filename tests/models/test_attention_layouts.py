"""Say for every family whether one shape of attention gets gradients in several layouts."""

from collections import defaultdict

import families
import pytest
import tiny_flux
import torch

from flow_grpo import seeds


@pytest.fixture
def layouts(monkeypatch):
    """Return {shapes and strides of an attention's inputs: strides of its outputs' gradients}."""
    seen, attention = defaultdict(set), torch.nn.functional.scaled_dot_product_attention

    def spied(query, key, value, *arguments, **named):
        out = attention(query, key, value, *arguments, **named)
        if out.requires_grad:
            call = tuple((x.shape, x.stride()) for x in (query, key, value))
            out.register_hook(lambda gradient: seen[call].add(gradient.stride()))
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spied)
    return seen


@pytest.fixture
def cudnn_attention():
    """Let cuDNN have attention, as a new process does, and put things back."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_cudnn_gets_no_attention_whose_gradients_have_several_layouts(
    name, tiny_dir, layouts, cudnn_attention
):
    family = families.FAMILIES[name]
    size, num = family.sizes[0], 2
    config = families.settings(name, tiny_dir(name))
    model = families.adapter(name).load(config, torch.device("cpu"))
    noise = seeds.normal((num, *model.latent_shape(size)), 0, seeds.INITIAL_NOISE)
    images = [[tiny_flux.image(i, *size) for i in range(family.references)]] * num
    with torch.no_grad():
        cond = model.encode(
            model.transformer, ["a cat", "two"], images if family.references else None,
            size=size, negative=model.negative,
        )  # fmt: skip
    model.transformer.requires_grad_(True)
    x, sigma = model.initial_latents(num, size, noise), torch.full((num,), 0.5)
    velocity = model.velocity(model.transformer, x, sigma, cond, family.guidance_scale)
    velocity.square().mean().backward()
    assert layouts, "no attention was seen"
    mixed = any(len(strides) > 1 for strides in layouts.values())
    assert mixed == model.mixed_gradients
    assert torch.backends.cuda.cudnn_sdp_enabled() is not mixed
