"""What Qwen-Image-Edit and -Edit-Plus make of reference images, beside what the contract asks."""

import math
import shutil

import diffusers
import families
import pytest
import tiny_flux
import tiny_qwen_edit
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from families import FAMILIES
from transformers import Qwen2VLProcessor
from transformers.utils import is_torchvision_available

from flow_grpo import seeds
from flow_grpo.models import qwenimage_edit
from flow_grpo.models.base import Cond
from flow_grpo.models.qwenimage_edit import QwenImageEdit, reference_size
from flow_grpo.models.qwenimage_edit_plus import QwenImageEditPlus
from flow_grpo.rollout import sample_trajectory

NAMES = ("qwenimage_edit", "qwenimage_edit_plus")
BUILD = {name: getattr(tiny_qwen_edit, name) for name in NAMES}
STOCK = dict(zip(NAMES, (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus), strict=True))
SIZE, SIDE, LENGTH = (16, 32), 64, 48  # references of 32 x 96: 64 * 64 pixels, rounded to 32
PROMPT = "make it red"
# Both sum the same float32 products in another order: a few units in the last place a step.
SAME = {"rtol": 0.0, "atol": 1e-5}
both = pytest.mark.parametrize("name", NAMES)


def _adapter(name: str, side: int = SIDE, length: int = LENGTH, **arguments):
    return families.adapter(name)(
        BUILD[name](**arguments), "cpu", max_sequence_length=length, reference_resolution=side
    )


def _images(name: str, first: int = 0, width: int = SIZE[1], height: int = SIZE[0]) -> list:
    return [tiny_flux.image(first + i, width, height) for i in range(FAMILIES[name].references)]


@torch.no_grad()
def _cond(model, images, prompt: str = PROMPT, size=SIZE) -> Cond:
    return model.encode(model.transformer, [prompt], [images], size=size, negative=" ")


def _noise(model, size=SIZE) -> torch.Tensor:
    return seeds.normal((1, *model.latent_shape(size)), 0, seeds.INITIAL_NOISE)


@torch.no_grad()
def _velocity(model, cond, scale: float = 4.0) -> torch.Tensor:
    sigma = torch.full((1,), 0.7)
    return model.velocity(model.transformer, _noise(model), sigma, cond, scale)


def _rms(difference: torch.Tensor) -> float:
    return difference.square().mean().sqrt().item()


def _sampled(model, cond, scale: float, num_steps: int = 3, size=SIZE):
    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, scale)

    return sample_trajectory(velocity, _noise(model, size), model.sigmas(num_steps, size)).final


def test_the_size_of_a_reference_by_hand():
    assert reference_size(1024, (512, 512)) == (1024, 1024)
    # sqrt(1024**2 * 416 / 240) = 1348.2 = 42.1 * 32; its 240 / 416 are 777.8 = 24.3 * 32.
    # The shape is now 1344 / 768, which gives 42.3 * 32 and 24.2 * 32: no other.
    assert reference_size(1024, (240, 416)) == (768, 1344)
    # 1.5: 3.67 * 32 and 2.45 * 32, so 128 x 64; its 2 give 4.24 * 32 and 2.12 * 32.
    assert reference_size(96, (32, 48)) == (64, 128)
    # 2.5: 1.58 * 32 and 0.63 * 32, so 64 x 32; its 2 give 1.41 * 32 and 0.71 * 32: a square.
    assert reference_size(32, (16, 40)) == (32, 32)


def test_the_pipelines_keep_a_reference_of_its_size():
    dimensions = {
        "qwenimage_edit": lambda *given: pipeline_qwenimage_edit.calculate_dimensions(*given)[:2],
        "qwenimage_edit_plus": pipeline_qwenimage_edit_plus.calculate_dimensions,
    }
    for side in (256, 512, 1024):
        for height in range(208, 1025, 48):
            for width in range(208, 1025, 16):
                found = reference_size(side, (height, width))
                for keep in dimensions.values():
                    assert keep(side * side, found[1] / found[0]) == found[::-1]
                assert 0.8 < math.prod(found) / side**2 < 1.25
                assert 0.7 < (found[1] / found[0]) / (width / height) < 1.4


@both
def test_references_of_any_shape_have_as_many_tokens(name):
    model = _adapter(name)
    odd = _images(name, width=64, height=20)
    cond = _cond(model, odd)
    assert cond["references"].shape == (1, len(odd), 4, 12, 16)
    for other in (_images(name, width=7, height=90), _images(name)):
        shapes = {key: tensor.shape for key, tensor in _cond(model, other).tensors.items()}
        assert shapes == {key: tensor.shape for key, tensor in cond.tensors.items()}
    resized = [model.pipeline.image_processor.resize(image, 32, 96) for image in odd]
    assert all(torch.equal(t, cond[key]) for key, t in _cond(model, resized).tensors.items())


@both
def test_the_text_encoder_and_the_transformer_both_look_at_every_image(name):
    model, images, others = _adapter(name), _images(name), _images(name, first=5)
    cond = _cond(model, images)
    velocity = _velocity(model, cond)
    for place, other in enumerate(others):
        changed = _cond(model, [*images[:place], other, *images[place + 1 :]])
        for seen in ("references", "prompt_embeds", "negative_prompt_embeds"):
            assert _rms(changed[seen] - cond[seen]) > 0.02
            partly = Cond(cond.tensors | {seen: changed[seen]})
            assert _rms(_velocity(model, partly) - velocity) > 3e-3, (seen, place)
    if len(images) > 1:
        assert _rms(_velocity(model, _cond(model, images[::-1])) - velocity) > 3e-3


@both
@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_references_may_have_time_0(name, zero_cond_t):
    pipeline = BUILD[name](zero_cond_t=zero_cond_t).to("cpu")
    for part in ("vae", "transformer", "text_encoder"):
        getattr(pipeline, part).eval()
    model, images = _adapter(name, zero_cond_t=zero_cond_t), _images(name)
    final = _sampled(model, _cond(model, images), 4.0)
    call = {"size": SIZE, "num_steps": 3, "guidance_scale": 4.0}
    wanted = families.unpatched(name, pipeline, [PROMPT], _noise(model), [images], **call)
    torch.testing.assert_close(final, wanted, **SAME)
    other = _adapter(name, zero_cond_t=not zero_cond_t)
    assert _rms(_sampled(other, _cond(other, images), 4.0) - final) > 3e-3


@both
@pytest.mark.parametrize("num", [1, 2, 3])
def test_any_number_of_images_that_the_pipeline_takes(name, num):
    model = _adapter(name)
    images = [tiny_flux.image(i, 32, 16) for i in range(num)]
    if num > model.max_images:
        with pytest.raises(AssertionError):
            _cond(model, images)
        return
    call = {"size": SIZE, "num_steps": 2, "guidance_scale": 4.0}
    wanted = families.unpatched(
        name, BUILD[name](zero_cond_t=False), [PROMPT], _noise(model), [images], **call
    )
    final = _sampled(model, _cond(model, images), 4.0, num_steps=2)
    torch.testing.assert_close(final, wanted, **SAME)


@both
def test_a_length_is_that_of_the_text_beside_the_images(name, caplog):
    # The processor makes 56 x 112 pixels of 32 x 96, which are few, and 56 x 168 of the 224 x 672
    # that Edit-Plus shows it, which are many; a token is 28 x 28.
    seen = {"qwenimage_edit": 2 * 4, "qwenimage_edit_plus": 2 * (2 * 6)}[name]
    models = [_adapter(name, length=length) for length in (48, 64, 12)]
    fits, longer, cut = (_cond(model, _images(name)) for model in models)
    assert fits["prompt_embeds"].shape[1] == LENGTH + seen
    num = int(fits["prompt_mask"].sum())
    assert 12 + seen < num < LENGTH + seen
    assert torch.equal(longer["prompt_embeds"][:, :num], fits["prompt_embeds"][:, :num])
    torch.testing.assert_close(_velocity(models[1], longer), _velocity(models[0], fits), **SAME)
    assert cut["prompt_mask"].all()
    assert torch.equal(cut["prompt_embeds"], fits["prompt_embeds"][:, : 12 + seen])
    (told,) = [message for message in caplog.messages if PROMPT in message]
    assert f"of {num - seen} tokens is cut off after 12 (sample.max_sequence_length)" in told


@both
def test_the_pipelines_own_call_leaves_nothing_behind(name):
    pipeline = BUILD[name]()
    for part in ("transformer", "text_encoder"):
        getattr(pipeline, part).to(torch.bfloat16)
    model = families.adapter(name)(
        pipeline, "cpu", max_sequence_length=LENGTH, reference_resolution=SIDE
    )
    vae, before = pipeline.vae, STOCK[name].calculate_dimensions
    images, call = _images(name), {"size": SIZE, "num_steps": 3, "guidance_scale": 4.0}
    with torch.no_grad():
        stock = model.stock([PROMPT], _noise(model), [images], **call)
    final = _sampled(model, _cond(model, images), 4.0)
    # Seen: 0.025. Pixels and the latents after every step are rounded to bfloat16 there.
    assert _rms(stock - final) < 0.05

    def failing():
        with qwenimage_edit.stock_call(pipeline, SIDE):
            assert STOCK[name].calculate_dimensions(1024 * 1024, 1.0)[:2] == (SIDE, SIDE)
            assert STOCK[name].calculate_dimensions(384 * 384, 1.0)[:2] == (384, 384)
            assert pipeline.vae.dtype == torch.bfloat16
            raise KeyError("no such")

    with pytest.raises(KeyError, match="no such"):
        failing()
    assert STOCK[name].calculate_dimensions is before
    assert pipeline.vae is vae
    assert vae.dtype == torch.float32


@pytest.fixture
def light():
    """Return a function that gives a pipeline an autoencoder that is quick with a million pixels.

    It has 8 pixels a latent, as the real one.
    """

    def pipeline(name: str):
        found = BUILD[name]()
        torch.manual_seed(0)
        vae = diffusers.AutoencoderKLQwenImage(
            base_dim=2, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
        )  # fmt: skip
        return type(found)(**{**found.components, "vae": vae.eval()})

    return pipeline


@pytest.mark.slow
@both
def test_at_the_published_area_the_adapter_is_the_pipeline_as_it_comes(name, light):
    pipeline = light(name)
    pipeline.set_progress_bar_config(disable=True)
    model = families.adapter(name)(light(name), "cpu", max_sequence_length=LENGTH)
    images = [tiny_flux.image(i, 1024, 1024) for i in range(FAMILIES[name].references)]
    final = _sampled(model, _cond(model, images, size=(32, 32)), 2.0, 2, (32, 32))
    wanted = pipeline(
        image=images if model.max_images > 1 else images[0],
        prompt=PROMPT, negative_prompt=" ", true_cfg_scale=2.0, num_inference_steps=2,
        height=32, width=32, latents=_noise(model, (32, 32)).flatten(1, 2), output_type="latent",
    ).images  # fmt: skip
    torch.testing.assert_close(final.flatten(1, 2), wanted, **SAME)
    assert _rms(final - _noise(model, (32, 32))) > 0.1
    assert model.stock_setup() == ""


@both
def test_without_torchvision_one_line_says_what_to_install(name, tiny_dir, monkeypatch, tmp_path):
    config = families.settings(name, tiny_dir(name))
    if is_torchvision_available():

        def missing(*_, **__):
            raise ImportError("torchvision")

        monkeypatch.setattr(Qwen2VLProcessor, "from_pretrained", missing)
    else:  # what real folders hold, and what the tests leave out
        shutil.copytree(tiny_dir(name), tmp_path / "real")
        config.pretrained.model = str(tmp_path / "real")
        videos = '{"video_processor_type": "Qwen2VLVideoProcessor"}'
        (tmp_path / "real/processor/video_preprocessor_config.json").write_text(videos)
        monkeypatch.delattr(Qwen2VLProcessor, "get_attributes")
    message = (
        r"needs torchvision, made for the torch that is installed \(\d.*pip install .*\[edit\]"
    )
    with pytest.raises(ValueError, match=message):
        families.adapter(name).load(config, torch.device("cpu"))


def test_a_pipeline_without_its_processor_is_an_error(tiny_dir, tmp_path):
    with pytest.raises(ValueError, match=r"cannot load .* a file is missing or broken"):
        qwenimage_edit.load_processor(str(tmp_path), "main")


@pytest.mark.parametrize(("adapter", "other"), [(QwenImageEdit, 1), (QwenImageEditPlus, 0)])
def test_the_other_variants_pipeline_is_refused_with_its_script(adapter, other, tiny_dir):
    config = families.settings(NAMES[other], tiny_dir(NAMES[other]))
    message = rf"not a {adapter.pipeline_class}; use scripts/train_{NAMES[other]}\.py, or"
    with pytest.raises(ValueError, match=message):
        adapter.load(config, torch.device("cpu"))


@both
def test_a_reference_resolution_that_cannot_be_is_an_error(name, tiny_dir):
    config = families.settings(name, tiny_dir(name), reference_resolution=31)
    with pytest.raises(ValueError, match=r"reference_resolution \(31\) must be at least 32"):
        families.adapter(name).load(config, torch.device("cpu"))
    model = _adapter(name)
    with pytest.raises(ValueError, match=r"reference_resolution \(64\) is too small .* 8 x 256"):
        model.check_size((8, 256))
    model.check_size((32, 256))
