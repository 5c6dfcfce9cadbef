"""Wan's adapter is the stock pipeline with Euler steps at noise 0, on clips."""

import diffusers
import pytest
import tiny_wan
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from config.base import locked_config
from flow_grpo import seeds
from flow_grpo.models.wan2_1 import Wan21
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDES, log_prob

SIZE, NUM_FRAMES = (32, 48), 9
SHAPE = (4, 3, 8, 12)  # of one sample's latents
PROMPTS = ['"AB" on a red sign, painted', 'the word "CDE"']
LENGTH = 48
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}


def _adapter(pipeline=None) -> Wan21:
    pipeline = pipeline or tiny_wan.wan()
    return Wan21(pipeline, "cpu", max_sequence_length=LENGTH, num_frames=NUM_FRAMES)


def _noise(num: int = 2) -> torch.Tensor:
    return seeds.normal((num, *SHAPE), 0, seeds.INITIAL_NOISE)


def _cond(model: Wan21, prompts, guidance_scale: float):
    negative = model.negative if guidance_scale > 1 else None
    cache = PromptCache(model, model.transformer, size=SIZE, negative=negative, max_size=99)
    return cache(prompts, "cpu")


def _sampled(model: Wan21, guidance_scale: float, num_steps: int) -> torch.Tensor:
    """Return x_0 by the core's ODE."""
    cond = _cond(model, PROMPTS, guidance_scale)

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, guidance_scale)

    x = model.initial_latents(2, SIZE, _noise())
    return sample_trajectory(velocity, x, model.sigmas(num_steps, SIZE)).final


def _euler(pipeline):
    """Give a pipeline the Euler scheduler of its flow shift, in evaluation mode."""
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=tiny_wan.FLOW_SHIFT)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def _stock(pipeline, guidance_scale: float, num_steps: int, output_type: str, prompts=PROMPTS):
    """Return what the pipeline itself gives."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        latents=_noise(),
        height=SIZE[0],
        width=SIZE[1],
        num_frames=NUM_FRAMES,
        guidance_scale=guidance_scale,
        num_inference_steps=num_steps,
        max_sequence_length=LENGTH,
        output_type=output_type,
    ).frames


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_without_noise_the_adapter_is_the_unpatched_pipeline(guidance_scale):
    model, stock = _adapter(), _euler(tiny_wan.wan())
    final = _sampled(model, guidance_scale, 6)
    wanted = _stock(stock, guidance_scale, 6, "latent")
    torch.testing.assert_close(final, wanted, **SAME)
    pixels = _stock(stock, guidance_scale, 6, "pt")
    with torch.no_grad():
        clips = model.decode(final)
    assert clips.shape == (2, NUM_FRAMES, 3, *SIZE)
    torch.testing.assert_close(clips, pixels, **SAME)
    assert (final - _noise()).abs().mean() > 0.1, "the steps must have moved the latents"
    assert (clips[:, 0] - clips[:, -1]).abs().mean() > 1e-3, "frames must differ"


def test_guidance_prompt_and_scheduler_change_the_unpatched_pipelines_result():
    stock = _euler(tiny_wan.wan())
    base = _stock(stock, 4.5, 6, "latent")
    assert (_stock(stock, 1.0, 6, "latent") - base).abs().mean() > 1e-2
    assert (_stock(stock, 4.5, 6, "latent", PROMPTS[::-1]) - base).abs().mean() > 1e-2
    stock.scheduler = tiny_wan.scheduler()
    assert (_stock(stock, 4.5, 6, "latent") - base).abs().mean() > 1e-2


def test_sigmas_are_eulers_with_the_flow_shift_and_the_pipeline_gets_that_scheduler():
    model = _adapter()
    own = FlowMatchEulerDiscreteScheduler(shift=3.0)
    own.set_timesteps(10)
    sigmas = model.sigmas(10, SIZE)
    assert torch.equal(sigmas, own.sigmas)
    torch.testing.assert_close(sigmas[-3:], torch.tensor([0.2780, 0.0089, 0.0]), rtol=0, atol=5e-5)
    assert isinstance(model.pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    other = tiny_wan.wan()
    other.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    assert _adapter(other).pipeline.scheduler.config.shift == 5.0
    other.scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
    )
    assert _adapter(other).pipeline.scheduler.config.shift == 8.0


def test_every_input_changes_the_velocity():
    model = _adapter()
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
            "order of frames": model.velocity(model.transformer, x.flip(2), sigma, cond, 4.5).flip(
                2
            ),
        }
    for name, other in others.items():
        per_sample = (other - velocity).square().flatten(1).mean(1).sqrt()
        assert (per_sample > 5e-3).all(), (name, per_sample)


def test_guidance_is_the_weighted_difference_of_two_single_forwards():
    model = _adapter()
    cond, negative = _cond(model, PROMPTS, 3.0), _cond(model, ["", ""], 1.0)
    x, sigma = _noise(), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        guided = model.velocity(model.transformer, x, sigma, cond, 3.0)
        positive = model.velocity(model.transformer, x, sigma, cond, 1.0)
        unguided = model.velocity(model.transformer, x, sigma, negative, 1.0)
    torch.testing.assert_close(guided, unguided + 3.0 * (positive - unguided), **SAME)


def test_a_condition_does_not_depend_on_its_batch():
    model = _adapter()
    several = model.encode(model.transformer, [*PROMPTS, "x"], size=SIZE, negative="")
    for place, prompt in enumerate(PROMPTS):
        alone = model.encode(model.transformer, [prompt], size=SIZE, negative="")
        assert alone.tensors.keys() == several.tensors.keys()
        for name, tensor in alone.tensors.items():
            assert tensor.shape[1] == LENGTH
            assert torch.equal(tensor[0], several[name][place]), name


def _bf16(pipeline):
    """Cast as from_pretrained does: what the model keeps in float32 stays so."""
    transformer = pipeline.transformer
    for name, parameter in transformer.named_parameters():
        if not any(part in name for part in transformer._keep_in_fp32_modules):
            parameter.data = parameter.data.bfloat16()
    return pipeline


@pytest.mark.parametrize(("cast", "atol"), [(lambda p: p, 5e-6), (_bf16, 5e-2)])
def test_the_velocity_of_a_sample_hardly_depends_on_its_batch(cast, atol):
    model = _adapter(cast(tiny_wan.wan()))
    cond, x = _cond(model, PROMPTS * 3, 4.5), seeds.normal((6, *SHAPE), 0, seeds.EVAL_NOISE)
    sigma = torch.linspace(0.9, 0.2, 6)
    with torch.no_grad():
        batch = model.velocity(model.transformer, x, sigma, cond, 4.5)
        for i in range(6):
            row = slice(i, i + 1)
            one = model.velocity(model.transformer, x[row], sigma[row], cond.index(row), 4.5)
            torch.testing.assert_close(batch[row], one, rtol=0, atol=atol)
    assert batch.dtype == torch.float32


@pytest.mark.parametrize(("frames", "nearest"), [(8, 9), (0, 1), (33, 33), (34, 33), (-9, 1)])
def test_a_number_of_frames_the_autoencoder_cannot_make_names_the_nearest(frames, nearest):
    def build(num_frames):
        return Wan21(tiny_wan.wan(), "cpu", max_sequence_length=LENGTH, num_frames=num_frames)

    if frames != nearest:
        with pytest.raises(ValueError, match=rf"num_frames \({frames}\).*nearest valid: {nearest}"):
            build(frames)
    assert build(nearest).latent_shape(SIZE)[1] == (nearest - 1) // 4 + 1


@pytest.mark.parametrize("length", [0, 513])
def test_a_length_that_no_prompt_can_be_padded_to_is_an_error(length):
    with pytest.raises(ValueError, match=rf"max_sequence_length \({length}\) must be in \[1, 512"):
        Wan21(tiny_wan.wan(), "cpu", max_sequence_length=length)


@pytest.mark.parametrize(("length", "nearest"), [(30, 32), (0, 8), (33, 32)])
def test_an_invalid_resolution_names_the_nearest_valid_one(length, nearest):
    model = _adapter()  # tokens of 2 x 2 latents of 4 x 4 pixels
    with pytest.raises(ValueError, match=rf"resolution \({length}\).*nearest valid: {nearest}$"):
        model.check_size((32, length))
    model.check_size((32, nearest))


def test_clips_keep_shape_and_latents_the_autoencoders_mean_and_scale():
    model, vae = _adapter(), tiny_wan.wan().vae.eval()
    clips = torch.rand(2, NUM_FRAMES, 3, *SIZE, generator=seeds.generator(0, seeds.EVAL_NOISE))
    mean = torch.tensor(tiny_wan.LATENTS_MEAN).view(1, 4, 1, 1, 1)
    std = torch.tensor(tiny_wan.LATENTS_STD).view(1, 4, 1, 1, 1)
    with torch.no_grad():
        x = model.encode_images(clips)
        back = model.decode(x)
        z = vae.encode(2 * clips.transpose(1, 2) - 1).latent_dist.mean
        pixels = (vae.decode(z).sample.transpose(1, 2) + 1) / 2
    assert x.shape == (2, *model.latent_shape(SIZE)) == (2, *SHAPE)
    torch.testing.assert_close(x * std + mean, z, **SAME)
    torch.testing.assert_close(back, pixels.clamp(0, 1), **SAME)


def test_prompts_are_encoded_the_same_after_the_encoder_left_the_device():
    model = _adapter()
    before = model.encode(model.transformer, PROMPTS, size=SIZE, negative="")
    model.offload_text_encoders()
    after = model.encode(model.transformer, PROMPTS, size=SIZE, negative="")
    assert all(torch.equal(after[name], before[name]) for name in before.tensors)


def _settings(folder: str, **changes):
    config = locked_config()
    config.pretrained.model, config.mixed_precision = folder, "no"
    config.sample.max_sequence_length, config.num_frames = LENGTH, NUM_FRAMES
    config.update(changes)
    return config


def test_a_saved_pipeline_is_loaded_in_the_precision_asked_for(tiny_wan_dir):
    fp32 = Wan21.load(_settings(tiny_wan_dir), "cpu")
    torch.testing.assert_close(_sampled(fp32, 4.5, 2), _sampled(_adapter(), 4.5, 2), **SAME)
    bf16 = Wan21.load(_settings(tiny_wan_dir, mixed_precision="bf16"), "cpu")
    assert bf16.dtype == bf16.pipeline.text_encoder.dtype == torch.bfloat16
    assert bf16.pipeline.vae.dtype == torch.float32
    full = _settings(tiny_wan_dir, mixed_precision="bf16", use_lora=False)
    assert Wan21.load(full, "cpu").dtype == torch.float32


def test_fp16_and_other_families_are_refused_with_the_reason(tiny_wan_dir, tiny_sd3_dir):
    with pytest.raises(ValueError, match=r"mixed_precision \('fp16'\) overflows.*bf16"):
        Wan21.load(_settings(tiny_wan_dir, mixed_precision="fp16"), "cpu")
    with pytest.raises(ValueError, match="holds a StableDiffusion3Pipeline, not a WanPipeline"):
        Wan21.load(_settings(tiny_sd3_dir), "cpu")


def test_wan_2_2_is_refused():
    pipeline = tiny_wan.wan()
    pipeline.register_modules(transformer_2=tiny_wan.wan().transformer)
    with pytest.raises(ValueError, match=r"Wan 2\.2"):
        _adapter(pipeline)


@pytest.mark.parametrize("name", SDES)
def test_a_replayed_step_has_ratio_one(name):
    model, sde = _adapter(), SDES[name]
    cond, sigmas = _cond(model, PROMPTS, 4.5), model.sigmas(4, SIZE)

    def velocity(x, sigma, *, replay=False):
        return model.velocity(model.transformer, x, sigma, cond, 4.5)

    kept = sample_trajectory(
        velocity, _noise(), sigmas, sde=sde, noise_level=0.8, stochastic=(0, 1), trained=(0, 1),
        noises=seeds.normal((2, 2, *SHAPE), 0, seeds.STEP_NOISE), storage_dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.no_grad():
        for t in (0, 1):
            x, now, then = kept.latents[:, t], sigmas[t].expand(2), sigmas[t + 1].expand(2)
            found = []
            for offset in (0.0, 0.1):  # the second: what a policy that has moved would say
                step = sde.step(
                    x, velocity(x, now) + offset, now, then, noise_level=0.8, sigma_max=sigmas[1]
                )
                found.append(log_prob(step, kept.next_latents[:, t], normalised=sde.normalised))
            assert torch.equal(found[0], kept.log_probs[:, t])
            assert ((found[1] - found[0]).abs() > 1e-4).all()
