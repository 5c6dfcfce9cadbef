"""The similarity is that of CLIP's own embeddings, of the image and its first reference."""

import shutil

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessorPil, CLIPModel

from flow_grpo.rewards.base import Samples, State
from flow_grpo.rewards.image_similarity import ImageSimilarity


@pytest.fixture
def reward(tiny_clip_dir, monkeypatch):
    monkeypatch.setenv("FLOW_GRPO_CLIP", tiny_clip_dir)
    return ImageSimilarity()


def picture(seed: int, height: int = 64, width: int = 64) -> torch.Tensor:
    """Return an image (3, h, w) of 256 coloured squares, in steps of 1/255."""
    colors = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return tensor(Image.fromarray(colors).resize((width, height), Image.Resampling.NEAREST))


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def given(images, references) -> Samples:
    num = len(images)
    return Samples(torch.stack(images), [""] * num, [{}] * num, references)


@torch.no_grad()
def cosine(folder: str, one: Image.Image, other: Image.Image) -> float:
    """Return the similarity as the library's documentation computes it."""
    model = CLIPModel.from_pretrained(folder)
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    pixels = processor(images=[one, other], return_tensors="pt")["pixel_values"]
    vectors = model.get_image_features(pixels).pooler_output
    assert vectors.shape == (2, 24)
    return torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0).item()


def test_it_is_the_cosine_of_clips_embeddings(reward, tiny_clip_dir):
    images, references = [picture(0), picture(1)], [(picture(2),), (picture(3),)]
    scores = reward(given(images, references))
    wanted = [
        cosine(tiny_clip_dir, pil(image), pil(own))
        for image, (own,) in zip(images, references, strict=True)
    ]
    # Both sum the same float32 products, over 2 images or 1 at a time.
    torch.testing.assert_close(scores.values, torch.tensor(wanted), rtol=0, atol=1e-5)
    assert scores.states.tolist() == [State.OK] * 2
    assert (scores.values < 0.999).all()
    assert abs(wanted[0] - wanted[1]) > 1e-3


def test_an_image_is_most_like_itself(reward):
    image = picture(0)
    scores = reward(given([image, picture(1), 0.5 * image], [(image,)] * 3))
    torch.testing.assert_close(scores.values[0], torch.tensor(1.0), rtol=0, atol=1e-6)
    assert (scores.values[1:] < 0.9999).all()


def test_a_reference_is_seen_as_large_as_the_image(reward, tiny_clip_dir):
    image, reference = picture(0), picture(1, 48, 160)
    value = reward(given([image], [(reference,)])).values.item()
    resized = pil(reference).resize((64, 64), Image.Resampling.BICUBIC)
    assert value == pytest.approx(cosine(tiny_clip_dir, pil(image), resized), abs=1e-5)
    cropped = cosine(tiny_clip_dir, pil(image), pil(reference))  # what CLIP would see of it
    assert abs(value - cropped) > 1e-3


def test_of_several_references_the_first_counts(reward):
    image, one, other = picture(0), picture(1), torch.ones(3, 64, 64)
    first, second = reward(given([image] * 2, [(one, other), (other, one)])).values
    assert first == reward(given([image], [(one,)])).values
    assert second == reward(given([image], [(other,)])).values
    assert abs(first - second) > 1e-3


def test_a_groups_reference_is_embedded_once(reward, monkeypatch):
    seen, embedding = [], reward.embedding
    monkeypatch.setattr(reward, "embedding", lambda pixels: seen.append(1) or embedding(pixels))
    one, other = picture(1), picture(2)
    reward(given([picture(seed) for seed in range(6)], [(one,)] * 4 + [(other,)] * 2))
    assert len(seen) == 6 + 2


def test_a_broken_reference_fails_its_own_samples(reward):
    broken = picture(1)
    broken[0, 3, 3] = torch.inf
    scores = reward(given([picture(0)] * 3, [(broken,), (picture(1),), (picture(1)[:1],)]))
    assert scores.states.tolist() == [State.FAILED, State.OK, State.FAILED]
    assert "not finite" in scores.reasons[0]


def test_weights_are_float32_frozen_and_of_the_vision_half(tmp_path, monkeypatch):
    model, processor = tiny_models.clip()
    model.bfloat16().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    monkeypatch.setenv("FLOW_GRPO_CLIP", str(tmp_path))
    parameters = dict(ImageSimilarity()._model.named_parameters())
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert not any(p.requires_grad for p in parameters.values())
    assert "visual_projection.weight" in parameters
    assert not [name for name in parameters if "text" in name]


def test_a_clip_that_cannot_be_loaded_is_one_line_that_says_where_to_name_one(
    tiny_clip_dir, tiny_sd3_dir, tmp_path, monkeypatch
):
    half = tmp_path / "half"
    shutil.copytree(tiny_clip_dir, half)
    (half / "model.safetensors").write_bytes(b"no weights")
    empty = tmp_path / "empty"
    empty.mkdir()
    part = tmp_path / "part"  # the rest would be random
    shutil.copytree(tiny_clip_dir, part)
    weights = load_file(part / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    for name in ("no/such_clip", str(empty), str(half), str(part), f"{tiny_sd3_dir}/text_encoder"):
        monkeypatch.setenv("FLOW_GRPO_CLIP", name)
        with pytest.raises(ValueError, match="FLOW_GRPO_CLIP=") as caught:
            ImageSimilarity()
        assert f"cannot load a CLIP from {name}: " in str(caught.value)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("FLOW_GRPO_CLIP", "")
    with pytest.raises(ValueError, match="from openai/clip-vit-large-patch14: "):
        ImageSimilarity()
