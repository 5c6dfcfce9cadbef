"""Time one rollout and one update of a preset at its models' real size, on one GPU.

    python benchmarks/full_size.py OUT.jsonl --gpus 1 --config config/grpo.py:general_ocr_sd3_1gpu

The weights are random (`true_pipelines.py`); everything else is the project's own path: the
preset's checks, `session.build`, `collect`, `score`, `update`. What is made smaller is the epoch:
one batch of the preset's `batch_size`, so the rollout is one batch and the update has its rows.
`--config.KEY=VALUE` overrides as in training; `--gpus` decides how the preset is cut in batches.
The reward is a statistic of the pixels. The learning rate is 0, so that every update is a first
one: |ratio - 1| must be 0. The adapter's B is random, not 0, so that the adapter counts.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parents[1]))

import true_pipelines
from families import adapter, family_of

from flow_grpo import session
from flow_grpo.batching import plan_batches
from flow_grpo.cli import parse
from flow_grpo.collecting import Collected, collect, score
from flow_grpo.images import open_image
from flow_grpo.models import base
from flow_grpo.models.base import Cond
from flow_grpo.models.loading import half_precision_dtype, quiet_libraries
from flow_grpo.progress import progress_bar
from flow_grpo.updating import update

GIB = 2**30
REWARD = "odd_rewards:Contrast"  # of the tests
ADAPTER_STD = 1e-3  # of B's random entries


class Meter:
    """Take the time and the peak memory of calls on one device, and write lines of results."""

    def __init__(self, device: torch.device, path: Path, common: dict):
        self.on_gpu, self.path, self.common = device.type == "cuda", path, common

    def write(self, what: str, **numbers) -> None:
        """Append a line; a run that fails later leaves what came before."""
        line = {**self.common, "what": what, **{k: rounded(v) for k, v in numbers.items()}}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        sys.stderr.write(json.dumps(line) + "\n")

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def start(self) -> None:
        """Forget the peak so far and what the allocator keeps for later."""
        if self.on_gpu:
            self.wait()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, float]:
        """Return the peak since `start`, GiB: of tensors, and of what was taken for them."""
        if not self.on_gpu:
            return {}
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak_gib": allocated / GIB, "peak_reserved_gib": reserved / GIB}

    def held(self) -> float:
        """Return the memory that tensors take now, GiB."""
        return torch.cuda.memory_allocated() / GIB if self.on_gpu else 0.0

    def seconds(self, call) -> tuple[float, object]:
        """Return the seconds that `call` takes and what it returns."""
        self.wait()
        started = time.perf_counter()
        result = call()
        self.wait()
        return time.perf_counter() - started, result


def rounded(number):
    return float(f"{number:.5g}") if isinstance(number, float) else number


class Stopwatch:
    """Stand in for a method and remember how long its calls took, and the peaks before them."""

    def __init__(self, meter: Meter, method):
        self.meter, self.method = meter, method
        self.seconds, self.before = 0.0, {}

    def __call__(self, *arguments):
        self.meter.wait()
        self.before = self.meter.peak()
        if self.meter.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds, result = self.meter.seconds(lambda: self.method(*arguments))
        self.seconds += seconds
        return result


def one_batch(config, gpus: int) -> None:
    """Shrink a preset's epoch to one batch of one GPU, without changing the batch."""
    plan = plan_batches(
        groups_per_epoch=config.sample.groups_per_epoch,
        group_size=config.sample.group_size,
        updates_per_epoch=config.train.updates_per_epoch,
        batch_size=config.sample.batch_size,
        world_size=gpus,
    )
    size = plan.batch_size
    group = plan.group_size if size % plan.group_size == 0 else size
    config.sample.groups_per_epoch, config.sample.group_size = size // group, group
    config.sample.batch_size, config.train.updates_per_epoch = size, 1
    config.train.learning_rate = 0.0
    config.reward_fn = {REWARD: 1.0}


def build(config, pipeline, folder: Path) -> session.Run:
    """Return what training would consist of, around a pipeline that is in memory already."""
    family = adapter(family_of(config.pretrained.model))
    if family.max_images:
        import tiny_flux

        tiny_flux.write_edit_set(folder)
        config.dataset = str(folder)
    accelerator = Accelerator(mixed_precision=config.mixed_precision)
    plan = session.check_config(config, accelerator.num_processes)
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    with contextlib.ExitStack() as stack:
        for module in {base, sys.modules[family.__module__]}:
            if hasattr(module, "load_pipeline"):
                patch = mock.patch.object(module, "load_pipeline", return_value=pipeline)
                stack.enter_context(patch)
        run = session.build(family, config, accelerator, plan, None)
    run.config.train.clip_range = 1e9  # the ratio's tolerance; the algorithm has read its own
    run.config.train.ratio_tolerance = 1e9
    generator = torch.Generator(accelerator.device).manual_seed(0)
    for name, parameter in zip(run.policy.names, run.policy.parameters, strict=True):
        if "lora_B" in name:
            parameter.data.normal_(std=ADAPTER_STD, generator=generator)
    return run


def num_bytes(cond: Cond) -> int:
    return sum(tensor.nbytes for tensor in cond.tensors.values())


def encode(run: session.Run, meter: Meter, repeat: int) -> None:
    """Measure the condition of one prompt: seconds, and bytes that the cache keeps of it."""
    prompts = run.prompts[:2]
    images = [tuple(map(open_image, prompts[0].images))] if run.model.max_images else None
    negative = run.model.negative if run.config.sample.guidance_scale > 1 else None

    def one(prompt, negative=None):
        with torch.no_grad():
            return run.model.encode(
                run.policy.module, [prompt.prompt], images, size=run.size, negative=negative
            )

    whole = one(prompts[0], negative)
    times = [meter.seconds(lambda: one(prompts[1]))[0] for _ in range(repeat)]
    own = one(prompts[1])
    meter.write(
        "encode",
        seconds=statistics.median(times),
        bytes_of_a_prompt=num_bytes(own),
        bytes_of_the_negative=num_bytes(whole) - num_bytes(own),
        shapes={name: list(tensor.shape[1:]) for name, tensor in whole.tensors.items()},
    )


def batch_inputs(run: session.Run, num: int) -> tuple[Tensor, Tensor, Cond]:
    """Return random x, the sigma of half way, and the conditions of the first prompts."""
    device = run.accelerator.device
    generator = torch.Generator(device).manual_seed(1)
    shape = (num, *run.model.latent_shape(run.size))
    x = torch.randn(shape, generator=generator, device=device)
    prompts = [run.prompts[i % len(run.prompts)] for i in range(num)]
    return x, torch.full((num,), 0.5, device=device), run.conditions(prompts)


def warm_up(run: session.Run, meter: Meter) -> None:
    """Run a forward, a backward and an optimizer step; count a velocity's operations."""
    x, sigma, cond = batch_inputs(run, run.plan.batch_size)
    scale = run.config.sample.guidance_scale
    with FlopCounterMode(display=False) as counter:
        run.policy.velocity(x, sigma, cond, scale, replay=True)
    meter.write("operations", velocity_tflop=counter.get_total_flops() / 1e12)
    for _ in range(4):  # a gradient scaler may skip the first
        loss = run.policy.velocity(x, sigma, cond, scale).square().mean()
        run.accelerator.backward(loss)
        if not run.policy.step(0, 0.0).skipped:
            break
    with torch.no_grad():
        run.model.decode(x)


def velocities(run: session.Run, meter: Meter, repeat: int) -> None:
    """Measure a batch's velocity, and how far each sample's differs from that of a batch of 1."""
    num = run.plan.batch_size
    x, sigma, cond = batch_inputs(run, num)
    scale = run.config.sample.guidance_scale

    def velocity(rows: slice) -> Tensor:
        with torch.no_grad():
            return run.policy.velocity(x[rows], sigma[rows], cond.index(rows), scale)

    together = velocity(slice(None))
    alone = torch.cat([velocity(slice(i, i + 1)) for i in range(num)])
    batch = [meter.seconds(lambda: velocity(slice(None)))[0] for _ in range(repeat)]
    single = [meter.seconds(lambda: velocity(slice(0, 1)))[0] for _ in range(repeat)]
    off = (together - alone).double()
    again = (together - velocity(slice(None))).abs().max()
    meter.write(
        "velocity",
        batch=num,
        seconds=statistics.median(batch),
        seconds_of_one=statistics.median(single),
        rms=together.double().square().mean().sqrt().item(),
        rms_difference=off.square().mean().sqrt().item(),
        max_difference=off.abs().max().item(),
        max_difference_of_a_repeat=again.item(),
    )


def rollout(run: session.Run, meter: Meter, repeat: int) -> Collected:
    """Measure a rollout: the trajectory and the decoding apart; the last of `repeat` is timed."""
    original, first = run.model.decode, {}
    for _ in range(repeat):
        run.model.decode = watch = Stopwatch(meter, original)
        meter.start()
        with progress_bar(run.accelerator, "rollout", run.plan.samples_per_rank) as bar:
            seconds, collected = meter.seconds(lambda: collect(run, 0, bar))
        peaks = {f"trajectory_{name}": peak for name, peak in watch.before.items()}
        peaks |= {f"decode_{name}": peak for name, peak in meter.peak().items()}
        first = first or peaks  # later passes have the allocator's memory from before
    run.model.decode = original
    meter.write(
        "rollout",
        samples=run.plan.samples_per_rank,
        steps=run.config.sample.num_steps,
        seconds=seconds - watch.seconds,
        decode_seconds=watch.seconds,
        kept_gib=sum(t.nbytes for t in collected.tensors.values()) / GIB,
        **first,
    )
    return collected


def first_steps(collected: Collected, num: int) -> Collected:
    """Return an epoch's samples, of which an update trains the first `num` steps only."""
    steps = collected.steps
    return collected._replace(steps=steps._replace(trained=steps.trained[:num]))


def train(run: session.Run, meter: Meter, name: str, collected: Collected, scores, repeat=1):
    """Measure an update; memory is that of the first pass, time that of the last."""
    original, size = run.policy.step, run.plan.batch_size
    steps, first = len(collected.steps.trained), {}
    for _ in range(repeat):
        run.policy.step = watch = Stopwatch(meter, original)
        meter.start()
        try:
            seconds, metrics = meter.seconds(lambda: update(run, collected, scores))
        except torch.OutOfMemoryError as error:
            run.policy.optimizer.zero_grad()
            meter.write("update", name=name, batch=size, error=str(error).split(". ")[0])
            return
        finally:
            run.policy.step = original
        first = first or watch.before
    meter.write(
        "update",
        name=name,
        batch=size,
        checkpointing=bool(run.model.transformer.is_gradient_checkpointing),
        trained_steps=steps,
        seconds=seconds - watch.seconds,
        seconds_of_a_step=(seconds - watch.seconds) / steps,
        optimizer_seconds=watch.seconds,
        ratio_dev_first=metrics["train/ratio_dev_first"],
        grad_norm=metrics["train/grad_norm"],
        kl=metrics.get("train/kl"),
        **first,
    )


def set_checkpointing(run: session.Run, wanted: bool) -> None:
    transformer = run.model.transformer
    (transformer.enable_gradient_checkpointing if wanted
     else transformer.disable_gradient_checkpointing)()  # fmt: skip


def measure(run: session.Run, meter: Meter, *, repeat: int, short: int) -> None:
    """Measure everything; variants of the update train `short` steps."""
    pipeline, policy = run.model.pipeline, run.policy
    parts = {k: p for k, p in pipeline.components.items() if isinstance(p, nn.Module)}
    trained = sum(p.numel() for p in policy.parameters)
    meter.write(
        "weights",
        held_gib=meter.held(),
        trained_millions=trained / 1e6,
        cudnn_attention=torch.backends.cuda.cudnn_sdp_enabled(),
        **{f"{n}_gib": sum(p.nbytes for p in m.parameters()) / GIB for n, m in parts.items()},
    )
    encode(run, meter, 3)
    warm_up(run, meter)
    meter.write("held", gib=meter.held())  # with the optimizer's state and the average
    velocities(run, meter, 3)
    collected = rollout(run, meter, repeat)
    seconds, (scores, _) = meter.seconds(lambda: score(run, collected))
    meter.write("reward", seconds=seconds)
    train(run, meter, "preset", collected, scores, repeat)
    part = first_steps(collected, short)
    plan, checkpointing = run.plan, bool(run.model.transformer.is_gradient_checkpointing)
    run.plan = plan._replace(batch_size=1)
    train(run, meter, "one sample a forward", part, scores, repeat)
    run.plan = plan
    run.model.offload_text_encoders()
    train(run, meter, "text encoders offloaded", part, scores, repeat)
    set_checkpointing(run, not checkpointing)
    train(run, meter, "and the other checkpointing", part, scores, repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, required=True, help="that the preset is run on")
    parser.add_argument("--repeat", type=int, default=2, help="passes of rollout and update")
    parser.add_argument("--short", type=int, default=2, help="trained steps of the variants")
    parser.add_argument("--no_cudnn_attention", action="store_true", help="leave it to the others")
    parser.add_argument("--tiny", action="store_true", help="a tiny pipeline: to try the script")
    given, rest = parser.parse_known_args()
    torch.backends.cuda.enable_cudnn_sdp(not given.no_cudnn_attention)
    quiet_libraries()
    config = parse(["full_size.py", *rest])
    one_batch(config, given.gpus)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = family_of(config.pretrained.model)
    if family not in true_pipelines.PARTS and not given.tiny:
        parser.error(f"the true size of {family} is not in true_pipelines.py")
    meter = Meter(device, given.out, {"preset": config.run_name})
    half = half_precision_dtype(config.mixed_precision)
    parts = (true_pipelines.tiny_parts if given.tiny else true_pipelines.PARTS.get)(family)
    started = time.perf_counter()
    pipeline = true_pipelines.pipeline(family, parts, half, device)
    meter.write(
        "machine",
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if meter.on_gpu else "cpu",
        cudnn=torch.backends.cudnn.version(),
        seconds_to_draw_weights=time.perf_counter() - started,
    )
    with tempfile.TemporaryDirectory() as folder, meter_errors(meter):
        run = build(config, pipeline, Path(folder))
        with contextlib.closing(run.rewards):
            measure(run, meter, repeat=given.repeat, short=given.short)


@contextlib.contextmanager
def meter_errors(meter: Meter):
    """Write what ended a run."""
    try:
        yield
    except (RuntimeError, ValueError, FloatingPointError) as error:
        meter.write("error", text=f"{type(error).__name__}: {error}"[:500], **meter.peak())
        raise


if __name__ == "__main__":
    main()
