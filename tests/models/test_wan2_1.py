"""What is Wan's own: Euler steps in place of UniPC, clips, the versions that it is not."""

import diffusers
import families
import pytest
import tiny_wan
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from config.base import locked_config
from flow_grpo import seeds
from flow_grpo.models.wan2_1 import Wan21

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


@torch.no_grad()
def _cond(model: Wan21):
    return model.encode(model.transformer, PROMPTS, size=SIZE, negative=model.negative)


def test_unipc_the_published_solver_gives_another_result():
    pipeline, x = _adapter().pipeline, _noise()
    settings = {"size": SIZE, "num_steps": 6, "guidance_scale": 4.5}
    euler = families.unpatched("wan2_1", pipeline, PROMPTS, x, **settings)
    assert isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    pipeline.scheduler = tiny_wan.scheduler()
    unipc = pipeline(
        PROMPTS, latents=x, height=SIZE[0], width=SIZE[1], num_frames=NUM_FRAMES,
        guidance_scale=4.5, num_inference_steps=6, max_sequence_length=LENGTH,
        output_type="latent",
    ).frames  # fmt: skip
    assert (unipc - euler).abs().mean() > 1e-2
    assert (unipc - euler).abs().mean() < 0.2 * (euler - x).abs().mean(), "of the same equation"


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


def test_the_order_of_frames_matters():
    model, x, sigma = _adapter(), _noise(), torch.full((2,), 0.7)
    cond = _cond(model)
    with torch.no_grad():
        velocity = model.velocity(model.transformer, x, sigma, cond, 4.5)
        turned = model.velocity(model.transformer, x.flip(2), sigma, cond, 4.5).flip(2)
    assert ((turned - velocity).square().flatten(1).mean(1).sqrt() > 5e-3).all()


@pytest.mark.parametrize(("frames", "nearest"), [(8, 9), (0, 1), (33, 33), (34, 33), (-9, 1)])
def test_a_number_of_frames_the_autoencoder_cannot_make_names_the_nearest(frames, nearest):
    def build(num_frames):
        return Wan21(tiny_wan.wan(), "cpu", max_sequence_length=LENGTH, num_frames=num_frames)

    if frames != nearest:
        with pytest.raises(ValueError, match=rf"num_frames \({frames}\).*nearest valid: {nearest}"):
            build(frames)
    assert build(nearest).latent_shape(SIZE)[1] == (nearest - 1) // 4 + 1


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


@pytest.mark.parametrize("change", ["transformer_2", "expand_timesteps"])
def test_wan_2_2_is_refused(change, tmp_path):
    pipeline = tiny_wan.wan()
    if change == "transformer_2":
        pipeline.register_modules(transformer_2=tiny_wan.wan().transformer)
    else:
        pipeline.register_to_config(expand_timesteps=True)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Wan 2\.2"):
        Wan21.load(families.settings("wan2_1", str(tmp_path)), torch.device("cpu"))


def test_the_adapter_lies_in_both_attentions_of_every_block(adapter_modules):
    found, unused = adapter_modules("wan2_1")
    parts = ("to_k", "to_q", "to_v", "to_out.0")
    assert found == {f"blocks.{i}.attn{j}.{p}" for i in (0, 1) for j in (1, 2) for p in parts}
    assert unused == set()


def test_a_number_of_frames_is_checked_before_anything_is_loaded():
    config = locked_config()
    config.mixed_precision, config.num_frames = "bf16", 34
    with pytest.raises(ValueError, match=r"num_frames \(34\) .* nearest valid: 33$"):
        Wan21.check_config(config)
    config.num_frames = 33
    Wan21.check_config(config)
