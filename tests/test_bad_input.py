"""Whatever a user gets wrong is one clear line and exit code 1, and loses nothing.

All of it goes through the command line: in this process where nothing but arguments matters, in
one of its own where the process is what suffers.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flow_grpo import checkpoint
from flow_grpo.algorithms.grpo import Grpo

ROOT = Path(__file__).resolve().parents[1]
GRPO = ROOT / "config" / "grpo.py"

KL = ["--config.train.kl_coef=0.1"]

# What is given, and what the one line must say: what came, what there is, what is nearest.
MISTAKES = {
    "preset": (["--config", f"{GRPO}:tiny_ocrr"],
               ["unknown preset 'tiny_ocrr'", "general_ocr_sd3", "nearest: tiny_ocr"]),
    "no file": (["--config", "config/grp.py:tiny_ocr"], ["'config/grp.py'", "e.g. config/grpo.py"]),
    "key": (["--config.train.learning_rat=1"],
            ["unknown key config.train.learning_rat", "did you mean config.train.learning_rate"]),
    "flag": (["--dryrun"], ["dryrun"]),
    "no flag": (["--config.num_epochs", "3"], ["'3' is no flag; write --config.key=value"]),
    "type": (["--config.num_epochs=many"], ["--config.num_epochs=many"]),
    "reward": (["--config.reward_fn=jpeg_compresibility:1.0"],
               ["unknown reward 'jpeg_compresibility'", "ocr", "did you mean 'jpeg_compressib"]),
    "reward without weight": (["--config.reward_fn=ocr"], ["'ocr' is not name:weight; e.g. ocr:1"]),
    "reward weights of zero": (["--config.reward_fn=ocr:0"], ["no reward a weight other than 0"]),
    "new reward by key": (["--config.reward_fn.ocr=1"], ["error: ", "ocr", "reward_fn"]),
    "dotted reward": (["--config.reward_fn=no_such_thing:X:1"], ["'no_such_thing:X' cannot be"]),
    "algorithm": (["--config.algorithm=grop"], ["unknown algorithm 'grop'", "you mean 'grpo'?"]),
    "sde": (["--config.sample.sde_type=flowsde"],
            ["unknown sample.sde_type 'flowsde'", "dance_sde", "did you mean 'flow_sde'?"]),
    "control": (["--config.control=flip"], ["unknown control 'flip'", "flip_advantages"]),
    "tracker": (["--config.trackers=wanb"], ["unknown tracker 'wanb'", "nearest is 'wandb'"]),
    "kl scale": ([*KL, "--config.train.kl_type=gaussian", "--config.train.kl_scale=tru"],
                 ["train.kl_scale ('tru')", "true, reference"]),
    "kl type": ([*KL, "--config.train.kl_type=vel"], ["('vel')", "auto, gaussian, velocity, vel"]),
    "unread": (["--config.train.dpo_beta=5"], ["does not read train.dpo_beta (5.0; default "]),
    "solver": (["--config.sample.ode_solver=heun"], ["'heun'", "euler, dpm2m"]),
    "schedule": (["--config.train.lr_schedule=cosin"], ["'cosin'", "constant, linear, cosine"]),
    "updates": (["--config.train.updates_per_epoch=17"],
                ["updates_per_epoch (17)", "16 samples", "nearest valid updates_per_epoch is 16"]),
    "old names": (["--config.sample.num_batches_per_epoch=4",
                   "--config.train.gradient_accumulation_steps=3"],
                  ["gradient_accumulation_steps (3)", "4 batches", "nearest valid: 2"]),
    "noise 0": (["--config.sample.noise_level=0"], ["sample.noise_level (0.0) must be above 0"]),
    "noise below 0": (["--config.sample.noise_level=-0.7"], ["sample.noise_level (-0.7) must be"]),
    "window outside": (["--config.sample.sde_window_range=2,9"],
                       ["window range (2, 9) is not inside (0, 3)", "valid range is (2, 3)"]),
    "window too large": (["--config.sample.sde_window_size=5"],
                         ["window size (5)", "nearest valid size is 3"]),
    "window of three": (["--config.sample.sde_window_range=0,1,2"],
                        ["sde_window_range (0, 1, 2) must be two step indices, such as (0, 3)"]),
    "window of text": (["--config.sample.sde_window_range=a,b"], ["must be two step indices"]),
    "one step": (["--config.sample.num_steps=1"], ["num_steps (1)", "nearest valid num_steps is"]),
    "group of one": (["--config.sample.group_size=1"],
                     ["group_size (1)", "nearest valid group_size is 2"]),
    "no epochs": (["--config.num_epochs=0"], ["num_epochs (0) must be finite and at least 1"]),
    "no passes": (["--config.train.num_inner_epochs=0"], ["train.num_inner_epochs (0) must be"]),
    "eval batch": (["--config.eval.batch_size=0"], ["eval.batch_size (0) must be"]),
    "cache": (["--config.sample.prompt_cache_size=0"], ["sample.prompt_cache_size (0) must be"]),
    "learning rate": (["--config.train.learning_rate=nan"], ["train.learning_rate (nan) must be"]),
    "clip range": (["--config.train.clip_range=-1"], ["train.clip_range (-1.0) must be"]),
    "seed": (["--config.seed=-1"], ["seed (-1)", "nearest valid seed is 0"]),
    "dataset": (["--config.dataset=dataset/ocrr"], ["no dataset folder dataset/ocrr", "mean ocr?"]),
    "prompt_fn": (["--config.prompt_fn=genevl"], ["unknown prompt_fn 'genevl'", "mean geneval?"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_that_needs_no_model_is_one_line_even_in_a_dry_run(
    mistake, tiny_arguments, train, tmp_path
):
    given, parts = MISTAKES[mistake]
    for action in ([], ["--dry_run"]):
        line = train(*tiny_arguments, *given, *action).error
        for part in parts:
            assert part in line, line
        assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))
    # Having failed, the folder is free for the corrected command.
    if mistake in ("dataset", "noise 0"):
        assert train(*tiny_arguments, "--config.num_epochs=1").code == 0


def test_samples_that_do_not_divide_over_the_ranks(tiny_arguments, train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    line = train(*tiny_arguments, "--config.sample.groups_per_epoch=47",
                 "--config.sample.group_size=25", "--dry_run").error  # fmt: skip
    assert "groups_per_epoch (47) * group_size (25) = 1175 samples do not divide over" in line
    assert "world_size (8); the nearest valid groups_per_epoch is 48" in line


def prompts(tmp_path: Path, train_text: str | None, test_text: str = '"HELLO"\n') -> str:
    """Write a prompt set and return its flag."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for split, text in (("train", train_text), ("test", test_text)):
        if text is not None:
            (folder / f"{split}.txt").write_text(text)
    return f"--config.dataset={folder}"


@pytest.mark.parametrize(
    ("text", "message"), [(None, "has no train.txt"), ("\n\n", "holds no prompts")]
)
def test_a_missing_or_empty_prompt_file(tiny_arguments, train, tmp_path, text, message):
    line = train(*tiny_arguments, prompts(tmp_path, text)).error
    assert message in line
    assert str(tmp_path / "prompts") in line


OCR = "--config.reward_fn=ocr:1.0"


def test_ocr_leaves_out_prompts_that_quote_nothing_and_says_how_many(
    tiny_arguments, train, tmp_path
):
    flag = prompts(tmp_path, 'a cat\n"HI" on a sign\na dog\n"YES" in snow\n')
    outcome = train(*tiny_arguments, flag, OCR + ",odd_rewards:Quoted:1.0", "--config.num_epochs=1")
    assert outcome.code == 0, outcome.err
    assert "2 of 4 train prompts" in outcome.err
    assert "cannot be scored by ocr, odd_rewards:Quoted and are left out" in outcome.err
    assert "2 train and 1 held-out prompts" in outcome.err


def test_ocr_stops_where_no_prompt_quotes_anything(tiny_arguments, train, tmp_path):
    line = train(*tiny_arguments, prompts(tmp_path, "a cat\na dog\n"), OCR).error
    assert "none of the 2 train prompts" in line
    assert "the ocr reward needs a quoted text" in line


def test_a_model_path_that_does_not_exist(tiny_arguments, train, tmp_path):
    line = train(*tiny_arguments, f"--config.pretrained.model={tmp_path / 'nowhere'}").error
    assert str(tmp_path / "nowhere") in line
    assert "model_index.json" in line
    assert train(*tiny_arguments, "--config.num_epochs=1").code == 0  # corrected, the same folder


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"_class_name": "FluxPipeline"}', "holds a FluxPipeline, not a StableDiffusion3Pipeline"),
        ("{", "is no valid JSON"),
        (None, "holds no model_index.json"),
    ],
)
def test_a_model_that_is_no_sd3(tiny_arguments, train, tmp_path, index, message):
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    assert message in train(*tiny_arguments, f"--config.pretrained.model={tmp_path}").error


def test_a_size_that_the_model_cannot_make(tiny_arguments, train):
    line = train(*tiny_arguments, "--config.resolution=33").error
    assert "resolution (33)" in line
    assert "nearest valid: 32" in line


def states(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_folder_of_another_configuration_is_left_alone(tiny_arguments, train, tmp_path):
    assert train(*tiny_arguments).code == 0
    before = states(tmp_path / "runs" / "run")
    line = train(*tiny_arguments, "--config.seed=7", "--config.train.learning_rate=1e-5").error
    assert "belongs to a run with another config: seed (42 -> 7)" in line
    assert "train.learning_rate (0.0003 -> 1e-05)" in line
    assert "--config.run_name" in line
    assert states(tmp_path / "runs" / "run") == before


def test_a_corrupt_checkpoint_gives_way_to_the_one_before(tiny_arguments, train, tmp_path):
    folder = tmp_path / "runs" / "run"
    assert train(*tiny_arguments).code == 0
    expected = states(folder / "checkpoints" / "checkpoint-2" / "state")
    os.truncate(folder / "checkpoints" / "checkpoint-2" / "state" / "ema.safetensors", 50)
    outcome = train(*tiny_arguments)
    assert outcome.code == 0, outcome.err
    assert "checkpoint-2 is not usable (state/ema.safetensors differs" in outcome.err
    assert "falling back to the one before" in outcome.err
    assert "checkpoint-1: epoch 1, update 2" in outcome.err
    assert states(folder / "checkpoints" / "checkpoint-2" / "state") == expected


def test_resuming_from_what_is_no_checkpoint(tiny_arguments, train, tmp_path):
    line = train(*tiny_arguments, f"--config.resume_from={tmp_path}").error
    assert f"resume_from ({tmp_path}) is no usable checkpoint" in line


def test_resuming_from_a_checkpoint_of_another_shape(tiny_arguments, train, tmp_path):
    assert train(*tiny_arguments).code == 0
    path = tmp_path / "runs" / "run" / "checkpoints" / "checkpoint-2"
    line = train(*tiny_arguments, f"--config.resume_from={path}", "--config.run_name=other",
                 "--config.train.lora_rank=4").error  # fmt: skip
    assert "lora_rank" in line
    assert "has shape" in line


def test_a_folder_that_is_a_file(tiny_arguments, train, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").write_text("")
    assert str(tmp_path / "runs" / "run") in train(*tiny_arguments).error


def test_a_checkpoint_folder_that_cannot_be_written(tiny_arguments, train, tmp_path):
    """A file stands in its place, since a read-only mode does not bind the root user."""
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "checkpoints").write_text("")
    outcome = train(*tiny_arguments)
    assert "cannot save" in outcome.error
    assert str(tmp_path / "runs" / "run" / "checkpoints" / "checkpoint-1") in outcome.error
    assert "Traceback" in (tmp_path / "runs" / "run" / "error.log").read_text()


LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
runpy.run_path("scripts/train_sd3.py", run_name="__main__")
"""


def test_a_disk_that_fills_up_while_saving_costs_only_the_last_epoch(
    tiny_arguments, train, tmp_path
):
    """The limit on a file's size lies between the report and a checkpoint's tensors."""
    arguments = [*tiny_arguments, "--config.train.lora_rank=32"]
    assert train(*arguments).code == 0
    folder = tmp_path / "runs" / "run"
    before = states(folder / "checkpoints")
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    largest = max(size for path, size in sizes.items() if path.suffix == ".safetensors")
    limit = largest - 1000
    assert max(size for path, size in sizes.items() if path.suffix != ".safetensors") < limit
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments,
               "--config.num_epochs=4", "--config.eval_freq=100"]  # fmt: skip
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "PYTHONPATH": str(ROOT)}
    failed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert failed.returncode == 1, failed.stderr
    (line,) = [text for text in failed.stderr.splitlines() if text.startswith("error: ")]
    assert "checkpoint-3" in line
    assert "earlier checkpoints are as they were" in line
    assert "Traceback" not in failed.stderr
    assert states(folder / "checkpoints") == before
    assert train(*arguments, "--config.num_epochs=4").code == 0  # when there is space again
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "reward/total" in line] == [0, 1, 2, 3]


def test_a_disk_that_is_full_at_the_metrics_is_one_line_too(tiny_arguments, train, tmp_path):
    assert train(*tiny_arguments).code == 0
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    before, limits = metrics.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 10, limits[1]))
    try:
        outcome = train(*tiny_arguments, "--config.num_epochs=3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large, while writing below" in outcome.error
    assert str(metrics.parent) in outcome.error
    assert train(*tiny_arguments, "--config.num_epochs=3").code == 0
    assert metrics.read_text().startswith(before)
    assert [json.loads(text) for text in metrics.read_text().splitlines()]


def reward(name: str) -> str:
    return f"--config.reward_fn=odd_rewards:{name}:1.0"


def test_a_reward_that_gives_nan_for_some_costs_those_samples(tiny_arguments, train, tmp_path):
    outcome = train(*tiny_arguments, reward("NanForSome"), "--config.num_epochs=1")
    assert outcome.code == 0, outcome.err
    assert "reward odd_rewards failed for 2 of 4 samples: returned nan" in outcome.err
    text = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    (line,) = [json.loads(x) for x in text.splitlines() if "reward/total" in x]
    assert line["failed/reward"] == 4  # one a call; 2 batches, each in 2 parts
    assert line["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NanForAll", "returned nan"),
        ("Raises", "RuntimeError: the scorer lost its weights"),
        ("Hangs", "no answer within 0.3 s"),
    ],
)
def test_a_reward_that_never_scores_stops_the_run_with_the_reason(
    tiny_arguments, train, name, reason
):
    line = train(*tiny_arguments, reward(name), "--config.reward.timeout_s=0.3").error
    assert "no sample of epoch 0 has a reward" in line
    assert reason in line


def test_a_second_reward_lives_on_beside_one_that_is_only_logged_and_fails(
    tiny_arguments, train, tmp_path
):
    outcome = train(
        *tiny_arguments, "--config.num_epochs=1",
        "--config.reward_fn=jpeg_compressibility:1.0,odd_rewards:Raises:0",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    assert '"eval/jpeg_compressibility"' in text
    assert '"eval/odd_rewards"' not in text


def assert_sound(folder: Path, epoch: int) -> None:
    path, manifest = checkpoint.newest(folder / "checkpoints")
    assert manifest["epoch"] == epoch
    for file in path.rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file


def test_a_non_finite_loss_stops_before_the_optimizer(tiny_arguments, train, tmp_path, monkeypatch):
    honest, calls = Grpo.loss, []

    def loss(self, policy, rows):
        value, metrics = honest(self, policy, rows)
        calls.append(1)
        if len(calls) < 9:  # 4 forwards an epoch: the first of the third one
            return value, metrics
        return value * torch.nan, metrics | {"loss": metrics["loss"] * torch.nan}

    monkeypatch.setattr(Grpo, "loss", loss)
    outcome = train(*tiny_arguments, reward("Contrast"), "--config.num_epochs=5")
    assert "the loss is nan at update 4 (epoch 2)" in outcome.error
    assert "Look at the rewards" in outcome.error
    folder = tmp_path / "runs" / "run"
    assert_sound(folder, 2)
    before = states(folder / "checkpoints" / "checkpoint-2")
    monkeypatch.setattr(Grpo, "loss", honest)
    again = train(*tiny_arguments, reward("Contrast"), "--config.num_epochs=3")
    assert again.code == 0, again.err
    assert states(folder / "checkpoints" / "checkpoint-2") == before


def test_a_non_finite_gradient_stops_before_the_optimizer(
    tiny_arguments, train, tmp_path, monkeypatch
):
    from flow_grpo.policy import Policy

    honest, steps = Policy.step, []

    def step(self, update, learning_rate):
        if update == 2:
            self.parameters[0].grad[0, 0] = torch.inf
            steps.append([p.detach().clone() for p in self.parameters])
            try:
                return honest(self, update, learning_rate)
            finally:
                steps.append([p.detach().clone() for p in self.parameters])
        return honest(self, update, learning_rate)

    monkeypatch.setattr(Policy, "step", step)
    line = train(*tiny_arguments, reward("Contrast")).error
    assert "gradient norm is inf at update 2" in line
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))
    assert_sound(tmp_path / "runs" / "run", 1)


def test_a_learning_rate_beyond_reason_ends_in_one_line(tiny_arguments, train, tmp_path):
    outcome = train(*tiny_arguments, reward("Contrast"), "--config.train.learning_rate=1e30")
    assert "is nan" in outcome.error or "is inf" in outcome.error
    assert "learning_rate" in outcome.error
    assert checkpoint.newest(tmp_path / "runs" / "run" / "checkpoints") is None


def test_a_ratio_that_is_not_one_on_policy_stops_with_where_to_look(
    tiny_arguments, train, monkeypatch
):
    honest = Grpo.loss

    def loss(self, policy, rows):
        kept = rows.kept | {"log_probs": rows.kept["log_probs"] - 0.1}
        return honest(self, policy, rows._replace(kept=kept))

    monkeypatch.setattr(Grpo, "loss", loss)
    line = train(*tiny_arguments, reward("Contrast")).error
    assert "|ratio - 1| is 0.105 in the first update of epoch 0" in line  # exp(0.1) - 1
    assert "attention backend" in line
