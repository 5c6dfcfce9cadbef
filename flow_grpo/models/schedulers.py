"""Copy the sigmas that a pipeline's own scheduler makes."""

import copy

import numpy as np
import torch
from torch import Tensor


def scheduler_sigmas(
    scheduler,
    num_steps: int,
    *,
    linear: bool,
    num_tokens: int | None = None,
    max_shift: float = 1.15,
    mu: float | None = None,
) -> Tensor:
    """Return (num_steps + 1,) sigmas, 1 ... 0, float32 on the CPU; the scheduler is not touched.

    Args:
        scheduler: a pipeline's `FlowMatchEulerDiscreteScheduler`.
        num_steps: of the rollout.
        linear: whether the pipeline gives the scheduler sigmas from 1 to 1 / num_steps to shift
            (FLUX.1, Qwen-Image), or lets it make its own (SD3, Wan): these are other schedules.
        num_tokens: of the image to make; a scheduler with dynamic shifting depends on it. Those of
            reference images do not count. Not needed with `mu`.
        max_shift: what the pipeline takes where the scheduler does not say.
        mu: the shift of a pipeline that has its own rule for it (FLUX.2).
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler, settings, given = copy.deepcopy(scheduler), scheduler.config, {}
    if settings.get("use_dynamic_shifting", None):
        given["mu"] = (
            mu
            if mu is not None
            else calculate_shift(
                num_tokens,
                settings.get("base_image_seq_len", 256),
                settings.get("max_image_seq_len", 4096),
                settings.get("base_shift", 0.5),
                settings.get("max_shift", max_shift),
            )
        )
    if linear and not settings.get("use_flow_sigmas", False):
        given["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    else:
        given["num_inference_steps"] = num_steps
    scheduler.set_timesteps(device="cpu", **given)
    return scheduler.sigmas.to(torch.float32).cpu()
