"""Qwen-Image's adapter is the stock pipeline at noise 0, and a condition is its prompt's only."""

import math

import diffusers
import pytest
import tiny_qwen
import torch

from config.base import locked_config
from flow_grpo import guidance, seeds
from flow_grpo.models.qwenimage import QwenImage
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDES, log_prob

SIZE = (32, 48)  # 4 x 6 tokens: a transposed grid would show
PROMPTS = ['"AB" on a red sign, painted', 'the word "CDE"']  # of different lengths
LENGTH = 64
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}


def _adapter() -> QwenImage:
    return QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=LENGTH)


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, 4, 6, 16), 0, seeds.INITIAL_NOISE)


def _cond(model: QwenImage, prompts, guidance_scale: float):
    negative = model.negative if guidance_scale > 1 else None
    cache = PromptCache(model, model.transformer, size=SIZE, negative=negative, max_size=99)
    return cache(prompts, "cpu")


def _sampled(model: QwenImage, guidance_scale: float, num_steps: int, prompts=PROMPTS):
    """Return x_0 by the core's ODE."""
    cond = _cond(model, prompts, guidance_scale)

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    x = model.initial_latents(len(prompts), SIZE, _noise(len(prompts)))
    return sample_trajectory(velocity, x, model.sigmas(num_steps, SIZE)).final


def _untouched() -> diffusers.QwenImagePipeline:
    """Return a pipeline no adapter has touched, in evaluation mode as from_pretrained leaves it."""
    pipeline = tiny_qwen.qwenimage()
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def _stock(pipeline, guidance_scale: float, num_steps: int, output_type: str, prompts=PROMPTS):
    """Return what the pipeline itself gives."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        negative_prompt=[" "] * len(prompts) if guidance_scale > 1 else None,
        latents=_noise(len(prompts)).flatten(1, 2),
        height=SIZE[0],
        width=SIZE[1],
        true_cfg_scale=guidance_scale,
        num_inference_steps=num_steps,
        output_type=output_type,
    ).images


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["padded", "one"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_without_noise_the_adapter_is_the_unpatched_pipeline(prompts, guidance_scale):
    model, stock = _adapter(), _untouched()
    final = _sampled(model, guidance_scale, 6, prompts)
    wanted = _stock(stock, guidance_scale, 6, "latent", prompts)
    torch.testing.assert_close(model.stock_latents(final), wanted, **SAME)
    pixels = _stock(stock, guidance_scale, 6, "pt", prompts)
    with torch.no_grad():
        torch.testing.assert_close(model.decode(final), pixels, **SAME)
    assert (final - _noise(len(prompts))).abs().mean() > 0.1, "the steps must have moved x"
    assert pixels.std() > 0.01


def test_guidance_and_prompts_change_the_unpatched_pipelines_result():
    stock = _untouched()
    base = _stock(stock, 4.0, 6, "latent")
    assert (_stock(stock, 1.0, 6, "latent") - base).abs().mean() > 1e-2
    assert (_stock(stock, 4.0, 6, "latent", PROMPTS[::-1]) - base).abs().mean() > 1e-2


def test_the_pipelines_own_settings_are_what_the_adapter_names():
    model = _adapter()
    assert model.stock_settings(1.0) == {"true_cfg_scale": 1.0}
    stock = _untouched()
    stock.set_progress_bar_config(disable=True)
    latents = stock(
        PROMPTS[0], latents=_noise(1).flatten(1, 2), height=SIZE[0], width=SIZE[1],
        num_inference_steps=3, output_type="latent", **model.stock_settings(4.0),
    ).images  # fmt: skip
    final = _sampled(model, 4.0, 3, PROMPTS[:1])
    torch.testing.assert_close(final, latents.reshape(final.shape), **SAME)


def test_sigmas_are_shifted_by_the_number_of_tokens_and_end_at_the_terminal():
    model = _adapter()
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


def test_asking_for_sigmas_leaves_the_pipelines_scheduler_alone():
    model = _adapter()
    model.pipeline.scheduler.set_timesteps(7, mu=0.5)
    model.sigmas(4, SIZE)
    assert len(model.pipeline.scheduler.timesteps) == 7


def test_every_input_changes_the_velocity():
    model = _adapter()
    x, sigma = _noise(), torch.full((2,), 0.7)
    cond = _cond(model, PROMPTS, 4.0)
    swapped = cond.index(torch.tensor([1, 0]))
    unmasked = type(cond)(cond.tensors | {"prompt_mask": torch.ones(2, LENGTH, dtype=torch.bool)})
    with torch.no_grad():
        velocity = model.velocity(model.transformer, x, sigma, cond, 4.0)
        others = {
            "prompt": model.velocity(model.transformer, x, sigma, swapped, 4.0),
            "mask": model.velocity(model.transformer, x, sigma, unmasked, 4.0),
            "guidance": model.velocity(model.transformer, x, sigma, cond, 2.0),
            "no guidance": model.velocity(model.transformer, x, sigma, cond, 1.0),
            "sigma": model.velocity(model.transformer, x, sigma - 0.2, cond, 4.0),
            "x": model.velocity(model.transformer, x + 0.1, sigma, cond, 4.0),
            "grid": model.velocity(
                model.transformer, x.reshape(2, 6, 4, 16), sigma, cond, 4.0
            ).reshape(x.shape),
        }
    for name, other in others.items():
        per_sample = (other - velocity).square().flatten(1).mean(1).sqrt()
        assert (per_sample > 1e-2).all(), (name, per_sample)


def test_guidance_keeps_every_tokens_norm():
    model = _adapter()
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


def test_a_condition_does_not_depend_on_its_batch():
    model = _adapter()
    several = model.encode(model.transformer, [*PROMPTS, "x"], size=SIZE, negative=" ")
    for place, prompt in enumerate(PROMPTS):
        alone = model.encode(model.transformer, [prompt], size=SIZE, negative=" ")
        assert alone.tensors.keys() == several.tensors.keys()
        for name, tensor in alone.tensors.items():
            assert tensor.shape[1] == LENGTH
            assert torch.equal(tensor[0], several[name][place]), name


def test_a_longer_padding_changes_nothing_but_rounding():
    models = [QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=n) for n in (40, 128)]
    with torch.no_grad():
        short, long = (
            m.velocity(m.transformer, _noise(), torch.full((2,), 0.7), _cond(m, PROMPTS, 4.0), 4.0)
            for m in models
        )
    torch.testing.assert_close(short, long, **SAME)


# Largest difference seen on the CPU: 1.3e-6 in float32, 0 in bfloat16 (2 units in the last place
# of values up to 2 would be 3e-2); velocities are about 0.5.
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
def test_the_velocity_of_a_sample_hardly_depends_on_its_batch(dtype, atol):
    pipeline = tiny_qwen.qwenimage()
    pipeline.transformer.to(dtype)
    model = QwenImage(pipeline, "cpu", max_sequence_length=LENGTH)
    cond, x = _cond(model, PROMPTS * 3, 4.0), _noise(6)
    sigma = torch.linspace(0.9, 0.2, 6)
    with torch.no_grad():
        batch = model.velocity(model.transformer, x, sigma, cond, 4.0)
        for i in range(6):
            row = slice(i, i + 1)
            one = model.velocity(model.transformer, x[row], sigma[row], cond.index(row), 4.0)
            torch.testing.assert_close(batch[row], one, rtol=0, atol=atol)
    assert batch.dtype == torch.float32


def test_each_unique_prompt_is_one_forward_and_the_negative_one_for_all(monkeypatch):
    model, texts = _adapter(), []
    encode_prompt = model.pipeline.encode_prompt

    def counting(prompt, *args, **kwargs):
        texts.append(prompt)
        return encode_prompt(prompt, *args, **kwargs)

    monkeypatch.setattr(model.pipeline, "encode_prompt", counting)
    cache = PromptCache(model, model.transformer, size=SIZE, negative=" ", max_size=99)
    cache([PROMPTS[0], PROMPTS[1], PROMPTS[0]], "cpu")
    cache([PROMPTS[1]] * 4, "cpu")
    assert sorted(texts) == sorted([" ", *PROMPTS])


def test_a_prompt_beyond_the_fixed_length_is_cut_as_the_pipeline_cuts_it():
    model = QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=12)
    text = "q" * 40
    cond = model.encode(model.transformer, [text], size=SIZE, negative=None)
    assert cond["prompt_mask"].all()
    embeds, mask = _untouched().encode_prompt(text, max_sequence_length=12)
    assert mask is None
    torch.testing.assert_close(cond["prompt_embeds"], embeds, **SAME)


@pytest.mark.parametrize("length", [0, -1, 1025])
def test_a_length_that_no_prompt_can_be_padded_to_is_an_error(length):
    with pytest.raises(ValueError, match=rf"max_sequence_length \({length}\) must be in \[1, 1024"):
        QwenImage(tiny_qwen.qwenimage(), "cpu", max_sequence_length=length)


@pytest.mark.parametrize(("length", "nearest"), [(30, 32), (0, 8), (33, 32), (500, 496)])
def test_an_invalid_resolution_names_the_nearest_valid_one(length, nearest):
    model = _adapter()  # tokens of 2 x 2 latents of 4 x 4 pixels
    with pytest.raises(ValueError, match=rf"resolution \({length}\).*nearest valid: {nearest}$"):
        model.check_size((32, length))
    model.check_size((32, nearest))


def test_images_keep_shape_and_range_through_the_autoencoder():
    model = _adapter()
    images = torch.rand(2, 3, *SIZE, generator=seeds.generator(0, seeds.EVAL_NOISE))
    with torch.no_grad():
        x = model.encode_images(images)
        back = model.decode(x)
    assert x.shape == (2, *model.latent_shape(SIZE))
    assert back.shape == images.shape
    assert x.dtype == back.dtype == torch.float32
    assert back.min() >= 0
    assert back.max() <= 1


def test_latents_are_normalised_and_packed_as_the_pipelines_are():
    model = _adapter()
    vae, images = model.pipeline.vae, torch.rand(2, 3, *SIZE)
    mean = torch.tensor([0.1, -0.2, 0.3, 0.0]).view(1, 4, 1, 1)  # of the tiny autoencoder
    std = torch.tensor([1.5, 0.5, 2.0, 1.0]).view(1, 4, 1, 1)
    with torch.no_grad():
        z = vae.encode(2 * images[:, :, None] - 1).latent_dist.mean[:, :, 0]
        x = model.encode_images(images)
    packed = model.pipeline._pack_latents((z - mean) / std, 2, 4, 8, 12)
    torch.testing.assert_close(model.stock_latents(x), packed, **SAME)
    assert x[0, 1, 2, 3 * 4 + 1] == ((z - mean) / std)[0, 3, 2, 5]  # row 2*1 + 0, column 2*2 + 1


def test_prompts_are_encoded_the_same_after_the_encoder_left_the_device():
    model = _adapter()
    before = model.encode(model.transformer, PROMPTS, size=SIZE, negative=" ")
    model.offload_text_encoders()
    after = model.encode(model.transformer, PROMPTS, size=SIZE, negative=" ")
    assert all(torch.equal(after[name], before[name]) for name in before.tensors)


def test_frozen_parts_need_no_gradient_and_are_in_evaluation_mode():
    pipeline = _adapter().pipeline
    for part in (pipeline.vae, pipeline.transformer, pipeline.text_encoder):
        assert not part.training
        assert not any(p.requires_grad for p in part.parameters())


def _settings(folder: str, **changes):
    config = locked_config()
    config.pretrained.model, config.mixed_precision = folder, "no"
    config.sample.max_sequence_length = LENGTH
    config.update(changes)
    return config


def test_a_saved_pipeline_is_loaded_in_the_precision_asked_for(tiny_qwenimage_dir):
    fp32 = QwenImage.load(_settings(tiny_qwenimage_dir), "cpu")
    torch.testing.assert_close(_sampled(fp32, 4.0, 2), _sampled(_adapter(), 4.0, 2), **SAME)
    bf16 = QwenImage.load(_settings(tiny_qwenimage_dir, mixed_precision="bf16"), "cpu")
    assert bf16.dtype == bf16.pipeline.text_encoder.dtype == torch.bfloat16
    assert bf16.pipeline.vae.dtype == torch.float32
    full = _settings(tiny_qwenimage_dir, mixed_precision="bf16", use_lora=False)
    assert QwenImage.load(full, "cpu").dtype == torch.float32


def test_fp16_is_refused_with_the_reason(tiny_qwenimage_dir):
    with pytest.raises(ValueError, match=r"mixed_precision \('fp16'\) overflows.*bf16"):
        QwenImage.load(_settings(tiny_qwenimage_dir, mixed_precision="fp16"), "cpu")


def test_another_familys_pipeline_is_refused(tiny_sd3_dir):
    with pytest.raises(ValueError, match="holds a StableDiffusion3Pipeline, not a QwenImage"):
        QwenImage.load(_settings(tiny_sd3_dir), "cpu")


@pytest.mark.parametrize("name", SDES)
def test_a_replayed_step_has_ratio_one(name):
    model, sde = _adapter(), SDES[name]
    cond, sigmas = _cond(model, PROMPTS, 4.0), model.sigmas(4, SIZE)

    def velocity(x, sigma, *, replay=False):
        return model.velocity(model.transformer, x, sigma, cond, 4.0)

    noises = seeds.normal((2, 2, 4, 6, 16), 0, seeds.STEP_NOISE)
    kept = sample_trajectory(
        velocity, _noise(), sigmas, sde=sde, noise_level=0.8, stochastic=(0, 1), trained=(0, 1),
        noises=noises, storage_dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.no_grad():
        for t in (0, 1):
            x, now, then = kept.latents[:, t], sigmas[t].expand(2), sigmas[t + 1].expand(2)
            step = sde.step(x, velocity(x, now), now, then, noise_level=0.8, sigma_max=sigmas[1])
            again = log_prob(step, kept.next_latents[:, t], normalised=sde.normalised)
            assert torch.equal(again, kept.log_probs[:, t])
            other = velocity(x, now) + 0.1  # what a policy that has moved would say
            moved = sde.step(x, other, now, then, noise_level=0.8, sigma_max=sigmas[1])
            far = log_prob(moved, kept.next_latents[:, t], normalised=sde.normalised)
            assert ((far - again).abs() > 1e-4).all()
