"""What a session refuses before it costs time, and where it goes on."""

import json

import pytest

from flow_grpo.models.wan2_1 import Wan21


def reward(name: str) -> str:
    return f"--config.reward_fn=odd_rewards:{name}:1.0"


@pytest.mark.parametrize(
    "key", ["train.max_grad_norm", "train.adv_clip_max", "train.clip_range", "eval.guidance_scale"]
)
def test_a_zero_that_would_stop_learning_is_refused(tiny_arguments, train, key):
    outcome = train(*tiny_arguments, f"--config.{key}=0", "--dry_run")
    assert f"{key} (0.0) must be finite and above 0" in outcome.error


def test_a_group_reward_is_not_given_parts_of_groups(tiny_arguments, train):
    call = [*tiny_arguments, reward("WholeGroups"), "--dry_run"]
    assert train(*call).code == 0  # batches of 8, groups of 4
    outcome = train(*call, "--config.sample.batch_size=2")
    assert "no whole number of groups of 4" in outcome.error


def test_going_back_to_an_earlier_checkpoint_goes_on_from_there(tiny_arguments, train, tmp_path):
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    call = [*tiny_arguments, "--config.num_checkpoint_limit=3"]
    assert train(*call, "--config.num_epochs=3").code == 0
    back = [*call, f"--config.resume_from={checkpoints / 'checkpoint-1'}"]
    assert train(*back, "--config.num_epochs=2").code == 0
    found = sorted(path.name for path in checkpoints.iterdir())
    assert found[:2] == ["checkpoint-1", "checkpoint-2"]
    assert found[2:] == ["left-checkpoint-2", "left-checkpoint-3"]
    # The same command again goes on where it got to, not at checkpoint-1 once more.
    again = train(*back, "--config.num_epochs=3")
    assert "epoch 2" in again.err
    assert (checkpoints / "checkpoint-3").is_dir()
    lines = (checkpoints.parent / "metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines if "reward/total" in line]
    assert epochs == [0, 1, 2]


@pytest.mark.parametrize("name", ["..", "../elsewhere", "/tmp/elsewhere", "."])
def test_a_run_lies_below_the_log_folder(tiny_arguments, train, name):
    outcome = train(*tiny_arguments, f"--config.run_name={name}", "--dry_run")
    assert "must name a folder below logdir" in outcome.error


@pytest.mark.parametrize("name", ["pixel_similarity", "image_similarity"])
def test_a_reward_of_edits_is_refused_where_nothing_is_edited(tiny_arguments, train, name):
    outcome = train(*tiny_arguments, f"--config.reward_fn=jpeg_compressibility:1,{name}:0")
    assert f"reward {name} compares an image with the one that was edited, but SD3" in outcome.error


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mixed_precision=fp8", "must be one of no, fp16, bf16"),
        ("train.lora_rank=0", "must be finite and at least 1"),
        ("resolution=-512", "resolution (-512) must be finite and at least 1"),
        ("width=-1", "width (-1) must be finite and at least 0"),
        ("pretrained.model=/nowhere", "is no folder here"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(tiny_arguments, train, setting, message):
    assert message in train(*tiny_arguments, f"--config.{setting}", "--dry_run").error


def test_a_reward_that_cannot_score_clips_is_refused_for_a_video_family(tiny_arguments, train):
    call = [*tiny_arguments, "--config.sample.max_sequence_length=32", "--dry_run"]
    assert train(*call, "--config.reward_fn=video_ocr:1", adapter=Wan21).code == 0
    outcome = train(*call, "--config.reward_fn=video_ocr:1,jpeg_compressibility:0", adapter=Wan21)
    assert "reward jpeg_compressibility scores image, but Wan21 makes video" in outcome.error
    assert "rewards for it: video_ocr (" in outcome.error


def test_a_reward_that_applies_to_no_prompt_is_named(tiny_arguments, train, tmp_path):
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        (tmp_path / "set" / f"{split}.txt").write_text("a cat\na dog\n")
    call = [*tiny_arguments, f"--config.dataset={tmp_path / 'set'}", "--dry_run"]
    outcome = train(*call, "--config.reward_fn=ocr:1,jpeg_compressibility:1")
    assert outcome.code == 0
    assert "reward ocr applies to none of the 2 train prompts" in outcome.err
    assert "jpeg_compressibility applies" not in outcome.err
    outcome = train(*call, "--config.reward_fn=ocr:1")
    assert "--config.dataset=dataset/ocr --config.prompt_fn=general_ocr" in outcome.error
