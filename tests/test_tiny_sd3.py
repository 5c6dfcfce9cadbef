"""The shipped small SD3 is what its card says, and the words of its three lives are disjoint."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "flow_grpo" / "assets" / "tiny_sd3"
sys.path.insert(0, str(ROOT / "scripts"))

from tiny_sd3 import words  # noqa: E402

PROMPTS = (ROOT / "dataset" / "tiny_ocr" / "test.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import StableDiffusion3Pipeline

    absent = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(FOLDER, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def dtypes(part: str) -> set[str]:
    (file,) = (FOLDER / part).glob("*.safetensors")
    with safe_open(file, framework="pt") as handle:
        return {handle.get_slice(key).get_dtype() for key in handle.keys()}  # noqa: SIM118


def test_the_folder_is_small_and_saved_as_stated():
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    assert size <= 16e6
    assert dtypes("transformer") == dtypes("vae") == {"F16"}
    assert dtypes("text_encoder") == dtypes("text_encoder_2") == {"F32"}


def test_a_plain_call_works_with_and_without_the_zero_tokens(pipeline):
    for settings in ({"max_sequence_length": 0}, {}):
        call = {"num_inference_steps": 2, "guidance_scale": 1.0, **settings}
        (image,) = pipeline(PROMPTS[0], **call).images
        assert image.size == (64, 64)


def test_the_tokenizer_spells_words_and_pools_at_its_own_eos(pipeline):
    tokenizer, encoder = pipeline.tokenizer, pipeline.text_encoder
    assert encoder.config.eos_token_id == tokenizer.eos_token_id != 2
    ids = tokenizer('"QZRH" on a green sign').input_ids
    assert len(ids) == 12  # start, quote, Q, Z, R, H, quote, on, a, green, sign, end
    assert len(tokenizer) == encoder.config.vocab_size


def test_held_out_accuracy_is_imperfect_and_guidance_has_something_to_teach(pipeline):
    from flow_grpo.rewards.base import Samples
    from flow_grpo.rewards.ocr import Ocr

    reward, means = Ocr(), {}
    for guidance_scale in (1.0, 3.0):
        images = pipeline(
            PROMPTS, num_inference_steps=8, guidance_scale=guidance_scale, max_sequence_length=0,
            generator=torch.Generator().manual_seed(0), output_type="pt",
        ).images  # fmt: skip
        samples = Samples(images.float(), PROMPTS, [{}] * len(PROMPTS))
        means[guidance_scale] = float(reward(samples).values.mean())
    # 0.50 and 0.87 on the card; the standard error is 0.027.
    assert 0.40 <= means[1.0] <= 0.70
    assert means[3.0] > means[1.0] + 0.2


def test_the_words_of_pretraining_training_and_evaluation_are_disjoint():
    train = (ROOT / "dataset" / "tiny_ocr" / "train.txt").read_text().splitlines()
    assert len(set(train)) == len(train) == 1000
    assert len(set(PROMPTS)) == len(PROMPTS) == 128
    assert {words.split_of(prompt.split('"')[1]) for prompt in train} == {"train"}
    assert {words.split_of(prompt.split('"')[1]) for prompt in PROMPTS} == {"test"}
    assert {words.split_of(word) for word in words.words("pretrain", 500)} == {"pretrain"}


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_prompt_files_are_what_their_generator_writes(split):
    file = ROOT / "dataset" / "tiny_ocr" / f"{split}.txt"
    lines = file.read_text().splitlines()
    assert lines == words.prompts(split, len(lines))
