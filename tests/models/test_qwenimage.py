"""What is Qwen-Image's own: a mask, guidance that keeps norms, a terminal of the shift."""

import math

import families
import pytest
import tiny_qwen
import torch

from flow_grpo import guidance, seeds
from flow_grpo.models.base import Cond
from flow_grpo.models.qwenimage import QwenImage
from flow_grpo.rollout import sample_trajectory

SIZE = (32, 48)  # 4 x 6 tokens: a transposed grid would show
PROMPTS = ['"AB" on a red sign, painted', 'the word "CDE"']  # of different lengths
LENGTH = 64
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> QwenImage:
    return QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=LENGTH)


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, 4, 6, 16), 0, seeds.INITIAL_NOISE)


@torch.no_grad()
def _cond(model: QwenImage, prompts, guidance_scale: float):
    negative = model.negative if guidance_scale > 1 else None
    return model.encode(model.transformer, prompts, size=SIZE, negative=negative)


def _sampled(model: QwenImage, guidance_scale: float, num_steps: int, prompts=PROMPTS):
    """Return x_0 by the core's ODE."""
    cond = _cond(model, prompts, guidance_scale)

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    x = model.initial_latents(len(prompts), SIZE, _noise(len(prompts)))
    return sample_trajectory(velocity, x, model.sigmas(num_steps, SIZE)).final


def test_a_prompt_by_itself_has_no_mask_in_the_pipeline_and_the_same_result(model):
    x, prompt = _noise(1), PROMPTS[:1]
    settings = {"size": SIZE, "num_steps": 6, "guidance_scale": 4.0}
    wanted = families.unpatched("qwenimage", model.pipeline, prompt, x, **settings)
    torch.testing.assert_close(_sampled(model, 4.0, 6, prompt), wanted, **SAME)


def test_the_pipelines_own_settings_are_what_the_adapter_names(model):
    assert model.stock_settings(1.0) == {"true_cfg_scale": 1.0}
    assert model.stock_settings(4.0) == {"true_cfg_scale": 4.0, "negative_prompt": " "}


def test_sigmas_are_shifted_by_the_number_of_tokens_and_end_at_the_terminal(model):
    # 24 tokens: mu = 0.5 + (0.9 - 0.5) * (24 - 256) / (8192 - 256) = 0.48831; s of the linear
    # schedule 1 ... 1/6 becomes e^mu / (e^mu + 1 / s - 1), then 1 - s is stretched to end at .98.
    linear, shift = torch.linspace(1, 1 / 6, 6), math.exp(0.5 - 0.4 * 232 / 7936)
    shifted = shift / (shift + 1 / linear - 1)
    stretched = 1 - (1 - shifted) * 0.98 / (1 - shifted[-1])
    sigmas = model.sigmas(6, SIZE)
    assert sigmas.dtype == torch.float32
    torch.testing.assert_close(sigmas[:-1], stretched, rtol=0, atol=1e-6)
    assert sigmas[-1] == 0
    assert abs(sigmas[3] - model.sigmas(6, (256, 256))[3]) > 5e-3, "it depends on the size"


def test_the_mask_and_the_shape_of_the_grid_change_the_velocity(model):
    x, sigma = _noise(), torch.full((2,), 0.7)
    cond = _cond(model, PROMPTS, 4.0)
    unmasked = Cond(cond.tensors | {"prompt_mask": torch.ones(2, LENGTH, dtype=torch.bool)})
    turned = x.reshape(2, 6, 4, 16)
    with torch.no_grad():
        velocity = model.velocity(model.transformer, x, sigma, cond, 4.0)
        others = {
            "mask": model.velocity(model.transformer, x, sigma, unmasked, 4.0),
            "grid": model.velocity(model.transformer, turned, sigma, cond, 4.0).reshape(x.shape),
        }
    for name, other in others.items():
        per_sample = (other - velocity).square().flatten(1).mean(1).sqrt()
        assert (per_sample > 1e-2).all(), (name, per_sample)


def test_guidance_keeps_every_tokens_norm(model):
    cond, negative = _cond(model, PROMPTS, 20.0), _cond(model, [" ", " "], 1.0)
    x, sigma = _noise(), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        guided = model.velocity(model.transformer, x, sigma, cond, 20.0)
        positive = model.velocity(model.transformer, x, sigma, cond, 1.0)
        unguided = model.velocity(model.transformer, x, sigma, negative, 1.0)
    combined = unguided + 20.0 * (positive - unguided)
    rescaled = combined * positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(guided, rescaled, **SAME)
    assert (combined - rescaled).square().mean().sqrt() > 1e-2, "the rescaling must matter"


def test_the_norm_of_one_token_by_hand():
    # 0 + 2 * ((3, 4) - (0, 3)) + (0, 3) = (6, 5); the prompt's norm is 5: times 5 / sqrt(61)
    found = guidance.norm_preserving(torch.tensor([0.0, 3.0]), torch.tensor([3.0, 4.0]), 2.0)
    torch.testing.assert_close(found, torch.tensor([6.0, 5.0]) * 5 / math.sqrt(61))


def test_the_gradient_flows_through_the_rescaling():
    negative, positive = torch.tensor([0.0, 3.0]), torch.tensor([3.0, 4.0])
    for argument in (0, 1):

        def norm_of(value, argument=argument):
            pair = [negative, positive]
            pair[argument] = value
            return guidance.norm_preserving(*pair, 2.0).norm()

        value = [negative, positive][argument].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(norm_of(value), value)
        # The result's norm is the positive's: its gradient is (3, 4) / 5, and 0 for the negative.
        wanted = torch.zeros(2) if argument == 0 else positive / 5
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6)


def test_a_longer_padding_changes_nothing_but_rounding():
    models = [QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=n) for n in (40, 128)]
    with torch.no_grad():
        short, long = (
            m.velocity(m.transformer, _noise(), torch.full((2,), 0.7), _cond(m, PROMPTS, 4.0), 4.0)
            for m in models
        )
    torch.testing.assert_close(short, long, **SAME)


def test_a_prompt_beyond_the_fixed_length_is_cut_as_the_pipeline_cuts_it():
    model = QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=12)
    text = "q" * 40
    cond = model.encode(model.transformer, [text], size=SIZE, negative=None)
    assert cond["prompt_mask"].all()
    embeds, mask = tiny_qwen.qwenimage().encode_prompt(text, max_sequence_length=12)
    assert mask is None
    torch.testing.assert_close(cond["prompt_embeds"], embeds, **SAME)


def test_latents_are_normalised_and_packed_as_the_pipelines_are(model):
    vae, images = model.pipeline.vae, torch.rand(2, 3, *SIZE)
    mean = torch.tensor([0.1, -0.2, 0.3, 0.0]).view(1, 4, 1, 1)  # of the tiny autoencoder
    std = torch.tensor([1.5, 0.5, 2.0, 1.0]).view(1, 4, 1, 1)
    with torch.no_grad():
        z = vae.encode(2 * images[:, :, None] - 1).latent_dist.mean[:, :, 0]
        x = model.encode_images(images)
    packed = model.pipeline._pack_latents((z - mean) / std, 2, 4, 8, 12)
    torch.testing.assert_close(model.stock_latents(x), packed, **SAME)
    one = ((z - mean) / std)[0, 3, 2, 5]  # row 2*1 + 0, column 2*2 + 1
    torch.testing.assert_close(x[0, 1, 2, 3 * 4 + 1], one, **SAME)


def test_the_adapter_lies_where_the_reference_has_it(adapter_modules):
    found, unused = adapter_modules("qwenimage")
    attention = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
    own = ("to_k", "to_q", "to_v", "to_out.0")
    parts = {f"attn.{name}" for name in (*attention, *own)}
    parts |= {f"{s}_mlp.{n}" for s in ("img", "txt") for n in ("net.0.proj", "net.2")}
    assert found == {f"transformer_blocks.{i}.{part}" for i in (0, 1) for part in parts}
    # The text half of the last block ends nowhere: no gradient for output and feed-forward.
    last = ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    assert unused == {f"transformer_blocks.1.{part}" for part in last}
