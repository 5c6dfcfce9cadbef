"""One process, DDP, FSDP 2 and ZeRO learn the same and resume each other's checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import families
import pytest
import torch
import yaml
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from flow_grpo import backends

ROOT = Path(__file__).resolve().parents[1]
LAUNCHES = ROOT / "scripts" / "accelerate_configs"
FILES = ("multi_gpu", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
DIVIDED = ("fsdp", "deepspeed_zero3")  # where a rank holds a part of every weight
CASES = {
    "lora": [
        "--config.sample.guidance_scale=3.0",
        "--config.train.kl_coef=0.01",
        "--config.train.max_grad_norm=1e-3",  # below the norms that there are, so it clips
    ],
    "full": ["--config.use_lora=False", "--config.algorithm=nft", "--config.train.kl_coef=0.01"],
    "bf16": ["--config.mixed_precision=bf16", "--config.train.gradient_checkpointing=True"],
}
KINDS = {"lora": ("parameters", "ema", "optimizer"), "bf16": ("parameters", "ema", "optimizer")}
KINDS["full"] = (*KINDS["lora"], "old")
# Sums over ranks are in another order, and Adam divides by their roots. Differences of the trained
# weights relative to how far they have moved; seen on two processes: at most 2e-6, but 2e-3 in bf16
# with ZeRO 3.
FAR, FAR_BF16_ZERO3 = 1e-4, 2e-2


def arguments(out: Path, model: str, case: str, extra: list[str]) -> list[str]:
    """Return a command line of two updates an epoch, each of several forwards on every rank."""
    return [
        "--config", "config/grpo.py:tiny_ocr", f"--config.pretrained.model={model}",
        "--config.reward_fn=odd_rewards:Contrast:1.0", "--config.resolution=32",
        "--config.sample.num_steps=4", "--config.eval.num_steps=4",
        "--config.sample.sde_window_range=0,3", "--config.sample.groups_per_epoch=4",
        "--config.sample.group_size=4", "--config.sample.batch_size=4",
        "--config.eval.num_prompts=5", "--config.trackers=none",
        "--config.train.updates_per_epoch=2", "--config.train.learning_rate=3e-4",
        f"--config.logdir={out / 'runs'}", f"--config.run_name={case}", *extra,
    ]  # fmt: skip


def dumped(out: Path, model: str, cases: dict, launcher: list[str], *other: Path, **env) -> Path:
    """Run `dump_backends.py` and return the folder that it wrote."""
    out.mkdir()
    lines = {case: arguments(out, model, case, extra) for case, extra in cases.items()}
    (out / "cases.json").write_text(json.dumps(lines))
    started([*launcher, "tests/dump_backends.py", out, out / "cases.json", *other], env)
    return out


def started(command: list, env: dict[str, str]) -> None:
    """Run a command to its end, with the tests' modules within reach."""
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "without_torchvision")
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k != "ACCELERATE_USE_CPU"}
    process = subprocess.run(
        command, cwd=ROOT, env=environment | {"PYTHONPATH": paths} | env, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]


def launcher(file: str, port: int) -> list[str]:
    """Return the launch of two processes as a file of accelerate_configs/ says."""
    if file.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file",
        str(LAUNCHES / f"{file}.yaml"), "--num_processes", "2", "--main_process_port", str(port),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tiny_sd3_dir, tmp_path_factory):
    """Return what one process dumped."""
    folder = tmp_path_factory.mktemp("backends")
    return dumped(folder / "alone", tiny_sd3_dir, CASES, [sys.executable], CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module", params=FILES)
def launched(request, alone, tiny_sd3_dir):
    """Return what two processes of a launch dumped."""
    command = launcher(request.param, 0)
    return dumped(
        alone.parent / request.param, tiny_sd3_dir, CASES, command, alone, CUDA_VISIBLE_DEVICES=""
    )


def state(folder: Path, case: str, when: str, kind: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{case}-{when}-{kind}.safetensors")


def told(folder: Path, case: str, rank: int = 0) -> dict:
    return json.loads((folder / f"{case}-{rank}.json").read_text())


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the Euclidean distance of two lists of tensors."""
    assert one.keys() == other.keys()
    return sum((one[k].double() - other[k].double()).square().sum().item() for k in one) ** 0.5


def assert_learnt_the_same(folder: Path, alone: Path, case: str, far: float) -> None:
    """Compare trained weights, averages, metrics and what is published."""
    start = state(alone, case, "start", "parameters")
    for kind in ("parameters", "ema"):
        assert distance(state(folder, case, "start", kind), start) == 0
        wanted, found = (state(at, case, "end", kind) for at in (alone, folder))
        moved = distance(wanted, start)
        assert moved > 1e-3
        assert distance(found, wanted) < far * moved
    wanted, found = (state(at, case, "end", "optimizer") for at in (alone, folder))
    # exp_avg and exp_avg_sq are far apart in size; the number of steps must be equal
    for name in ("step", "exp_avg", "exp_avg_sq"):
        one, other = (
            {k: t for k, t in at.items() if k.endswith(f".{name}")} for at in (wanted, found)
        )
        assert distance(one, other) <= far * distance(one, {k: 0 * t for k, t in one.items()})
    for one, other in zip(told(alone, case)["metrics"], told(folder, case)["metrics"]):
        assert other.keys() == one.keys()
        assert one.get("train/ratio_dev_first", 0.0) == 0.0
        assert other.get("train/ratio_dev_first", 0.0) == 0.0
        for name in ("reward/total", "train/grad_norm", "eval/total"):
            assert other[name] == pytest.approx(one[name], rel=max(1e-3, far))
    places = [at / "runs" / case / "checkpoints" / "checkpoint-1" for at in (alone, folder)]
    files = [next(place.glob("[lt][or]*/*.safetensors")) for place in places]  # lora, transformer
    wanted, found = map(load_file, files)
    assert distance(found, wanted) < far * distance(wanted, {k: 0 * t for k, t in wanted.items()})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_process_learns(launched, alone, case):
    zero3_bf16 = (launched.name, case) == ("deepspeed_zero3", "bf16")
    assert_learnt_the_same(launched, alone, case, FAR_BF16_ZERO3 if zero3_bf16 else FAR)
    assert told(launched, case, 1)["metrics"] == told(launched, case)["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(launched, case):
    for kind in KINDS[case]:
        end, resumed = (state(launched, case, when, kind) for when in ("end", "resumed"))
        assert distance(end, resumed) == 0, kind
    _, second, again = told(launched, case)["metrics"]
    assert again == second


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_take_over_what_one_process_saved(launched, alone, case):
    saved = alone / "runs" / case / "checkpoints" / "checkpoint-1" / "state"
    for kind in KINDS[case]:
        wanted = load_file(saved / f"{kind}.safetensors")
        assert any(tensor.any() for tensor in wanted.values())
        assert distance(state(launched, case, "moved", kind), wanted) == 0, kind


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(launched):
    for case in CASES:  # that they are unchanged is seen where it happens
        assert (
            "gradient norm is nan at update 4; weights are unchanged"
            in told(launched, case)["refused"]
        )


@pytest.mark.slow
def test_a_rank_holds_its_share_and_a_lora_stays_in_float32(launched):
    backend = {"multi_gpu": "Plain", "fsdp": "Fsdp2", "deepspeed_zero3": "Zero3"}
    for case in CASES:
        ranks = [told(launched, case, rank) for rank in (0, 1)]
        assert {rank["backend"] for rank in ranks} == {backend.get(launched.name, "Zero")}
        shares, whole = [rank["share"] for rank in ranks], ranks[0]["whole"]
        if launched.name in DIVIDED:
            assert whole <= sum(shares) < 1.1 * whole  # ZeRO pads
            assert max(shares) < 0.6 * whole
        else:
            assert shares == [whole, whole]
        blocks_and_rest = 2 + 1
        assert ranks[0]["groups"] == (blocks_and_rest if launched.name == "fsdp" else 0)
        precise = ["torch.float32"] if case != "bf16" else ["torch.bfloat16", "torch.float32"]
        assert ranks[0]["dtypes"] == precise
    for tensor in state(launched, "bf16", "end", "parameters").values():
        assert tensor.dtype == torch.float32


@pytest.fixture(scope="module")
def steps_alone(tiny_dir, tmp_path_factory):
    """Return what two steps of one process make of every family."""
    folder = tmp_path_factory.mktemp("steps")
    folders = {name: tiny_dir(name) for name in families.FAMILIES}
    (folder / "folders.json").write_text(json.dumps(folders))
    return stepped(folder, "alone", [sys.executable])


def stepped(folder: Path, name: str, launcher: list[str]) -> Path:
    (folder / name).mkdir()
    command = [*launcher, "tests/dump_steps.py", folder / name, folder / "folders.json"]
    started(command, {"CUDA_VISIBLE_DEVICES": ""})
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("file", ["fsdp", "deepspeed_zero2", "deepspeed_zero3"])
def test_every_family_takes_the_steps_of_one_process(file, steps_alone):
    launched = stepped(steps_alone.parent, file, launcher(file, 0))
    for family in families.FAMILIES:
        wanted, found = (load_file(at / f"{family}.safetensors") for at in (steps_alone, launched))
        assert wanted.keys() == found.keys()
        moved = {name: tensor for name, tensor in wanted.items() if "lora_B" in name}  # from 0
        still = {name: torch.zeros_like(tensor) for name, tensor in moved.items()}
        off = distance({name: found[name] for name in moved}, moved)
        assert off < 1e-4 * distance(moved, still), family  # seen: 7e-6, sums in another order
        for which in ("current", "reference", "ema"):
            assert (found[which] - wanted[which]).abs().max() < 1e-5, (family, which)
        assert (wanted["current"] - wanted["reference"]).abs().max() > 1e-3


@pytest.mark.parametrize("file", [path.stem for path in sorted(LAUNCHES.glob("*.yaml"))])
def test_every_launch_file_is_one_that_accelerate_takes(file):
    settings = yaml.safe_load((LAUNCHES / f"{file}.yaml").read_text())
    loaded = load_config_from_file(str(LAUNCHES / f"{file}.yaml"))
    kind = {"fsdp": "FSDP", "multi_gpu": "MULTI_GPU", "multi_node": "MULTI_GPU"}
    kind |= {"one_process": "NO"}
    assert str(loaded.distributed_type.value) == kind.get(file, "DEEPSPEED")
    assert loaded.mixed_precision == "no"  # the preset's counts
    assert (loaded.num_machines, loaded.num_processes) == (
        {"multi_node": (2, 16), "one_process": (1, 1)}.get(file, (1, 8))
    )
    if file.startswith("deepspeed"):
        assert settings["deepspeed_config"]["zero_stage"] == int(file[-1])
    if file == "fsdp":
        assert settings["fsdp_config"]["fsdp_version"] == 2


def accelerator(kind: DistributedType, stage: int = 2) -> SimpleNamespace:
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(distributed_type=kind, deepspeed_plugin=plugin)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_refuses_fp16_and_says_what_it_can_do(stage):
    with pytest.raises(ValueError, match=r"mixed_precision \(fp16\).*bf16 or no"):
        backends.check(accelerator(DistributedType.DEEPSPEED, stage), "fp16")
    for precision in ("bf16", "no"):
        backends.check(accelerator(DistributedType.DEEPSPEED, stage), precision)


def test_the_first_fsdp_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match=r"fsdp_version \(1\) must be 2.*fsdp\.yaml"):
        backends.check(accelerator(DistributedType.MULTI_GPU), "fp16")
    monkeypatch.setenv("FSDP_VERSION", "2")
    backends.check(accelerator(DistributedType.MULTI_GPU), "fp16")


@pytest.mark.parametrize("use_lora", [True, False])
def test_fsdp_divides_a_whole_models_gradient_after_every_backward(use_lora):
    """What waits for its sum is whole on every rank, which only a LoRA's may be."""
    asked = []
    fsdp = object.__new__(backends.Fsdp2)
    fsdp.module = SimpleNamespace(set_requires_gradient_sync=asked.append)
    fsdp._use_lora = use_lora
    for sync in (False, True):
        fsdp.accumulate(sync=sync)
    assert asked == [not use_lora, True]
