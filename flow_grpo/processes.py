"""Get on with a launcher: join what it started, and say of a mistake no more than one line."""

import json
import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

ASKED = "FLOW_GRPO_NUM_PROCESSES"  # by scripts/launch.sh: what its user asked for
FIRST_SPEAKS_S = 5.0  # for the first process of a machine to say what all of them would


def launched_for(kind: str) -> bool:
    """Return whether `accelerate launch` was told to use "DEEPSPEED" or "FSDP"."""
    return os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() == "true"


def without_gpu() -> bool:
    """Return whether processes must be told to meet on the CPU; else each would stay alone.

    DeepSpeed has its own way.
    """
    import torch

    return not launched_for("DEEPSPEED") and not torch.accelerator.is_available()


def accelerator_of_launch(mixed_precision: str):
    """Return the accelerator of how this process was launched, at the preset's precision.

    Without a device the processes talk through gloo, whatever the launcher takes for granted.
    """
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs

    deepspeed, has_device = launched_for("DEEPSPEED"), torch.accelerator.is_available()
    if deepspeed:
        _quiet_deepspeed(has_device)
    through = {"backend": "gloo"} if deepspeed and not has_device else {}
    # One rank downloads, saves or waits for a slow reward while the others wait for it.
    group = InitProcessGroupKwargs(timeout=timedelta(hours=2), **through)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=without_gpu(),
        kwargs_handlers=[group],
    )
    accelerator.gradient_accumulation_steps = 1  # a launcher's would divide every loss
    if deepspeed:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # or ZeRO 3 would divide every text encoder as it is loaded
    return accelerator


def _quiet_deepspeed(has_device: bool) -> None:
    """Keep off the screen what DeepSpeed says about the device and torch about DeepSpeed."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deprecated = r"`torch\.distributed\.\w+_tensor` is deprecated"
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
    if not has_device:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.ops

        # Else it is compiled at the start, which needs a compiler; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check_processes(started: int) -> None:
    """Raise ValueError if fewer processes run than were asked for, or several share a GPU.

    started: how many there are, of all machines.
    """
    asked = os.environ.get(ASKED)
    if asked is not None and int(asked) != started:
        raise ValueError(
            f"{asked} processes were asked for (NUM_PROCESSES) and {started} started; the file in "
            f"ACCELERATE_CONFIG ({os.environ.get('ACCELERATE_CONFIG') or 'none'}) must be for "
            "several GPUs (distributed_type MULTI_GPU, DEEPSPEED or FSDP)"
        )
    if asked is None and started == 1 and _launched_as_one_of_several():
        raise ValueError(
            "accelerate launch was asked for several processes and started one, as it does with "
            "--cpu, and on a machine without a GPU also without --multi_gpu; write --multi_gpu and "
            "no --cpu, with or without GPUs"
        )
    import torch

    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if 0 < gpus < here:
        raise ValueError(
            f"{here} processes on this machine would share its {gpus} GPUs, and each needs its "
            f"own; start at most {gpus} a machine (NUM_PROCESSES, --num_processes)"
        )


def say_mistake(line: str) -> None:
    """Write a line to stderr, and where torchrun looks for the cause of a failure.

    Where all processes of a machine fail alike the first one speaks; the launcher then ends the
    others.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:
        time.sleep(FIRST_SPEAKS_S)
    sys.stderr.write(f"{line}\n")
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        cause = json.dumps({"message": line, "timestamp": int(time.time())})
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(cause)


def _launched_as_one_of_several() -> bool:
    """Return whether `accelerate launch` gave this process a meeting point, but no rank.

    A MASTER_ADDR that was there before is the user's, for other runs, and says nothing.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or "LOCAL_RANK" in os.environ:
        return False
    try:
        before = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:  # no Linux, or the launcher has ended
        return False
    address = os.environ.get("MASTER_ADDR")
    return address is not None and f"MASTER_ADDR={address}".encode() not in before
