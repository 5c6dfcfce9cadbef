"""Resuming, world size and replay change nothing, bit for bit; seen on real processes.

Wall-clock numbers (`time/...`, `perf/...`) cannot be equal and are left out of every comparison.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flow_grpo import checkpoint

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, "scripts/train_sd3.py"]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
REWARD = "--config.reward_fn=odd_rewards:Contrast:1.0"
ENVIRONMENT = {
    **os.environ,
    "ACCELERATE_USE_CPU": "1",  # without it, torchrun makes two runs of one process each
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    return output


def metrics(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without what a clock says."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in x.items() if not k.startswith(("time/", "perf/"))} for x in lines]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a run that must not depend on how often it was interrupted."""
    files = [*folder.glob("checkpoints/*/*/*.safetensors"), *folder.glob("samples/*/*")]
    files += folder.glob("checkpoints/*/state/*")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def assert_same_run(folder: Path, expected: Path) -> None:
    assert metrics(folder) == metrics(expected)
    found, wanted = contents(folder), contents(expected)
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []
    for name in ("checkpoint-3", "checkpoint-6"):
        one, other = (checkpoint.manifest(run / "checkpoints" / name) for run in (folder, expected))
        for key in ("epoch", "update", "eval_total", "best_total"):
            assert one[key] == other[key]
    kinds = {Path(name).name for name in wanted}
    assert kinds >= {"parameters.safetensors", "ema.safetensors", "optimizer.safetensors"}
    assert kinds >= {"pytorch_lora_weights.safetensors", "scores.json", "000.png"}


def wait_for_lines(folder: Path, number: int, process: subprocess.Popen) -> None:
    """Return as soon as metrics.jsonl has `number` lines about training."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        file = folder / "metrics.jsonl"
        if file.is_file() and file.read_text().count('"reward/total"') >= number:
            return
        time.sleep(0.002)
    raise AssertionError(finish(process, code=0))


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def long_arguments(tiny_arguments) -> list[str]:
    """Return 2 N = 6 epochs, evaluated every epoch, saved after every third."""
    return [*tiny_arguments, REWARD, "--config.num_epochs=6", "--config.save_freq=3",
            "--config.num_checkpoint_limit=100", "--config.train.lr_schedule=cosine"]  # fmt: skip


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(long_arguments, train, tmp_path):
    whole = train(*long_arguments, "--config.run_name=whole")
    assert whole.code == 0, whole.err
    killed = [*TRAIN, *long_arguments, "--config.run_name=killed"]
    folder = tmp_path / "runs" / "killed"
    process = start(killed)
    wait_for_lines(folder, 4, process)  # one epoch after the checkpoint, which is lost
    kill(process)
    assert "resumed from" in finish(start(killed))
    assert_same_run(folder, tmp_path / "runs" / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_instant_changes_nothing(long_arguments, train, tmp_path, seed):
    assert train(*long_arguments, "--config.run_name=whole").code == 0
    killed = [*TRAIN, *long_arguments, "--config.run_name=killed"]
    folder, instants = tmp_path / "runs" / "killed", random.Random(seed)
    for epoch in (1, 3, 4):  # before any checkpoint, about its making, after it
        process = start(killed)
        wait_for_lines(folder, epoch, process)
        time.sleep(instants.uniform(0.0, 0.4))
        process.poll()
        process.kill()
        process.communicate()
    finish(start(killed))
    assert_same_run(folder, tmp_path / "runs" / "whole")


CASES = {
    "all_rows": ["--config.sample.guidance_scale=3.0"],
    # Rows without advantage are skipped: what is left lies on the first rank and is dealt again.
    "skipped_rows": ["--config.reward_fn=odd_rewards:FirstGroup:1.0", "--config.train.kl_coef=0"],
    # 16 samples in 3 updates are 6, 5 and 5, in 2 ranks 3+3 and 3+2 of them, padded to 8.
    "uneven_updates": ["--config.train.updates_per_epoch=3", "--config.train.kl_coef=0.01",
                       "--config.sample.sde_type=flow_sde"],
    "one_batch_a_rank": ["--config.train.updates_per_epoch=1", "--config.sample.group_size=8",
                         "--config.sample.groups_per_epoch=2", "--config.eval.num_prompts=1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def worlds(tiny_sd3_dir, tmp_path_factory):
    """Run CASES with one process and with two; return {world size: folder}."""
    folder = tmp_path_factory.mktemp("worlds")
    overrides = [
        f"--config.pretrained.model={tiny_sd3_dir}", REWARD, "--config.resolution=32",
        "--config.sample.num_steps=4", "--config.sample.sde_window_range=0,3",
        "--config.sample.groups_per_epoch=4", "--config.sample.group_size=4",
        "--config.sample.batch_size=8", "--config.trackers=none", "--config.eval.num_prompts=5",
    ]  # fmt: skip
    processes = []
    for size, launcher in ((1, [sys.executable]), (2, TWO_RANKS)):
        out = folder / str(size)
        out.mkdir()
        cases = {
            name: ["--config", "config/grpo.py:tiny_ocr", *overrides, *extra,
                   f"--config.logdir={out}", f"--config.run_name={name}"]
            for name, extra in CASES.items()
        }  # fmt: skip
        (out / "cases.json").write_text(json.dumps(cases))
        command = [*launcher, "tests/dump_epochs.py", str(out), str(out / "cases.json")]
        processes.append(start(command))
    for process in processes:
        finish(process)
    return {1: folder / "1", 2: folder / "2"}


def loaded(worlds, size: int, case: str, epoch: int) -> tuple[list[dict], list[dict]]:
    """Return each rank's tensors and texts."""
    stems = [worlds[size] / f"{case}-{epoch}-{rank}" for rank in range(size)]
    assert not (worlds[size] / f"{case}-{epoch}-{size}.json").exists()
    tensors = [load_file(f"{stem}.safetensors") for stem in stems]
    return tensors, [json.loads(Path(f"{stem}.json").read_text()) for stem in stems]


@pytest.mark.parametrize(("case", "epoch"), list(itertools.product(CASES, (0, 1))))
def test_two_processes_see_the_prompts_and_noise_of_one(worlds, case, epoch):
    ((one,), (text,)), (two, texts) = (loaded(worlds, n, case, epoch) for n in (1, 2))
    assert [prompt for t in texts for prompt in t["prompts"]] == text["prompts"]
    assert all(t["trained"] == text["trained"] for t in texts)
    if epoch == 0:  # later the weights differ in the last bits, and so do images
        for name in ("latents", "next_latents", "log_probs", "images"):
            assert torch.equal(torch.cat([rank[name] for rank in two]), one[name]), name
        for name in ("total", "advantages"):
            assert all(torch.equal(rank[name], one[name]) for rank in two), name
        assert one["advantages"].abs().max() > 0


@pytest.mark.parametrize(("case", "epoch"), list(itertools.product(CASES, (0, 1))))
def test_two_processes_learn_what_one_learns(worlds, case, epoch):
    ((one,), (text,)), (two, texts) = (loaded(worlds, n, case, epoch) for n in (1, 2))
    names = [name for name in one if "lora" in name]
    assert names
    for name in names:
        assert torch.equal(two[0][name], two[1][name]), name
        # Sums over rows are in another order: float32 rounding, and Adam divides by its root.
        torch.testing.assert_close(two[0][name], one[name], rtol=1e-3, atol=1e-5)
    for name, value in text["metrics"].items():
        assert texts[0]["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        assert texts[0]["metrics"][name] == texts[1]["metrics"][name]
    assert text["metrics"]["train/ratio_dev_first"] == 0.0
    assert text["metrics"]["train/grad_norm"] > 0


@pytest.mark.parametrize("case", CASES)
def test_two_processes_count_every_held_out_prompt_once(worlds, case):
    (_, (text,)), (_, texts) = (loaded(worlds, n, case, 0) for n in (1, 2))
    assert texts[0]["evaluation"] == texts[1]["evaluation"]
    # The ranks' shares, 3 and 2 of 5 or 1 and 0 of 1, are of another batch shape: float32 rounding.
    assert texts[0]["evaluation"] == pytest.approx(text["evaluation"], rel=1e-3)
    assert ("eval/total_stderr" in text["evaluation"]) == (case != "one_batch_a_rank")


def test_skipped_rows_really_lie_unevenly(worlds):
    (one,), _ = loaded(worlds, 1, "skipped_rows", 0)
    assert [int((half != 0).sum()) for half in one["advantages"].chunk(2)] == [4, 0]


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_with_one(tiny_arguments, train, tmp_path):
    arguments = [*tiny_arguments, REWARD, "--config.run_name=moved"]
    output = finish(start([*TWO_RANKS, "scripts/train_sd3.py", *arguments]))
    assert output.count("2 epochs, 32 images") == 1  # one rank speaks
    assert "per rank (2) 8 in 1 batches of 8" in output
    moved, whole = (train(*a, "--config.num_epochs=4") for a in
                    (arguments, [*arguments, "--config.run_name=whole"]))  # fmt: skip
    assert "epoch 2, update 4" in moved.err
    assert moved.code == whole.code == 0
    pairs = zip(*(metrics(tmp_path / "runs" / name) for name in ("moved", "whole")), strict=True)
    for one, other in pairs:  # float32 sums in another order
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)
        assert one.get("train/ratio_dev_first", 0.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["Raises", "NanForAll"])
def test_an_error_ends_both_processes(tiny_arguments, reward):
    command = [*TWO_RANKS, "scripts/train_sd3.py", *tiny_arguments]
    output = finish(start([*command, f"--config.reward_fn=odd_rewards:{reward}:1.0"]), code=1)
    assert "error: no sample of epoch 0 has a reward" in output


SDES = ("flow_sde", "cps", "dance_sde")
WINDOWS = {"window": 2, "full": 0}


@pytest.mark.parametrize(
    ("sde_type", "window", "guidance_scale"), list(itertools.product(SDES, WINDOWS, (1.0, 3.0)))
)
def test_the_ratio_of_an_unchanged_policy_is_exactly_one(
    tiny_arguments, train, tmp_path, sde_type, window, guidance_scale
):
    outcome = train(
        *tiny_arguments, REWARD,
        f"--config.sample.sde_type={sde_type}",
        f"--config.sample.sde_window_size={WINDOWS[window]}",
        f"--config.sample.guidance_scale={guidance_scale}",
        "--config.eval_freq=100", "--config.save_freq=100", "--config.num_epochs=3",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    lines = [line for line in metrics(tmp_path / "runs" / "run") if "reward/total" in line]
    assert [line["train/ratio_dev_first"] for line in lines] == [0.0] * 3
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert any(line["train/ratio_mean"] != 1.0 for line in lines)  # the second update is off policy


def test_the_guides_on_policy_setting_keeps_the_ratio_at_one(tiny_arguments, train, tmp_path):
    outcome = train(
        *tiny_arguments, REWARD,
        "--config.sample.num_batches_per_epoch=1",
        "--config.train.gradient_accumulation_steps=1",
    )  # fmt: skip
    assert "sample.groups_per_epoch = 2" in outcome.err  # 1 batch of 8, in groups of 4
    assert "train.updates_per_epoch = 1" in outcome.err
    lines = [line for line in metrics(tmp_path / "runs" / "run") if "reward/total" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["images"] == 8
        assert line["train/ratio_dev_first"] == 0.0
        assert line["train/ratio_mean"] == 1.0
        assert line["train/clip_fraction"] == 0.0
        assert line["train/grad_norm"] > 0
