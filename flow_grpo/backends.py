"""Wrap the trained module for how a run was launched: one process, DDP, FSDP version 2, or ZeRO.

`policy.py` alone uses this. A back-end knows which part of a trained tensor lies on this rank
(`local`), puts a whole tensor together from all ranks' parts (`whole`, a collective call), and
takes the optimizer step. Precision is the same everywhere: the module's forward runs under
autocast over weights as they were loaded, so a LoRA in float32 stays in float32.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from flow_grpo.models.loading import half_precision_dtype
from flow_grpo.processes import launched_for

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Moments = dict[str, Tensor]  # {"<index of the parameter>.<name of the optimizer's>": whole tensor}


class StepResult(NamedTuple):
    """Say what an optimizer step did; a norm that is not finite without a scaler: nothing."""

    grad_norm: float
    skipped: bool


def check(accelerator: Accelerator, mixed_precision: str) -> None:
    """Raise ValueError for what the launched back-end cannot do; it costs nothing."""
    backend = _class(accelerator)
    if issubclass(backend, Zero) and mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision (fp16) needs a gradient scaler, which DeepSpeed keeps to itself; set "
            "mixed_precision to bf16 or no, or launch with multi_gpu.yaml or fsdp.yaml"
        )
    if issubclass(backend, Fsdp2) and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            f"fsdp_version ({os.environ.get('FSDP_VERSION', '1')}) must be 2, as in "
            "scripts/accelerate_configs/fsdp.yaml"
        )


def wrap(accelerator, model, config, make_optimizer: MakeOptimizer) -> "Plain":
    """Return the back-end of how the run was launched, with its module and optimizer."""
    return _class(accelerator)(accelerator, model, config, make_optimizer)


def _class(accelerator) -> type["Plain"]:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.deepspeed_plugin.zero_stage
        return Zero3 if stage == 3 else Zero
    if launched_for("FSDP") and torch.distributed.is_initialized():
        return Fsdp2  # accelerate itself would leave it out where there is no device
    return Plain


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that are trained, in its order."""
    return [p for p in module.parameters() if p.requires_grad]


class Plain:
    """Train in one process, or with DDP: every rank holds every tensor whole."""

    def __init__(self, accelerator, model, config, make_optimizer: MakeOptimizer):
        self.accelerator, self._max_grad_norm = accelerator, config.train.max_grad_norm
        self._dtype = half_precision_dtype(config.mixed_precision)
        self._use_lora = config.use_lora
        self.module, self.optimizer = self._prepare(model, make_optimizer)
        self.parameters = trained(model.transformer)

    def _prepare(self, model, make_optimizer: MakeOptimizer):
        optimizer = make_optimizer(trained(model.transformer))
        return self.accelerator.prepare(model.transformer, optimizer)

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of a trained tensor, sharing its storage."""
        return parameter.detach()

    def whole(self, parameter: nn.Parameter, local: Tensor | None = None) -> Tensor:
        """Return the whole of what every rank has a part of; all ranks must call it.

        Args:
            parameter: gives the layout.
            local: this rank's part of a tensor like it; by default the parameter's own.
        """
        return parameter.detach() if local is None else local

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that is laid out as `parameter` is."""
        return whole.to(parameter.device)

    def before_swap(self) -> None:
        """Prepare for writing into the local parts."""

    def after_load(self) -> None:
        """Take over local parts that were written for good."""

    def accumulate(self, *, sync: bool):
        """Return the context of a forward and backward; only the last of an update syncs."""
        return nullcontext() if sync else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss."""
        self.accelerator.backward(loss)

    def step(self) -> StepResult:
        """Clip, step, clear the gradient; a gradient that is not finite changes nothing."""
        norm = float(self._clip())
        if self.accelerator.scaler is None and not math.isfinite(norm):
            return StepResult(norm, skipped=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(norm, self.accelerator.optimizer_step_was_skipped)

    def _clip(self) -> Tensor:
        return self.accelerator.clip_grad_norm_(self.parameters, self._max_grad_norm)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state, whole, one tensor at a time; all ranks must take it all."""
        for index, entry in self.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                whole = value if value.ndim == 0 else self._whole_moment(index, value)
                yield f"{index}.{name}", whole

    def _whole_moment(self, index: int, value: Tensor) -> Tensor:
        return self.whole(self.parameters[index], value)

    def load_moments(self, moments: Moments) -> None:
        """Take over what `moments` returned, with any back-end and number of ranks."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            index, name = key.split(".", 1)
            if value.ndim:
                value = self._own_moment(int(index), value)
            state.setdefault(int(index), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _own_moment(self, index: int, whole: Tensor) -> Tensor:
        return self.part(self.parameters[index], whole)


class Fsdp2(Plain):
    """Divide weights, gradients and optimizer state over the ranks, block by block (FSDP 2).

    A group may hold frozen weights in half and a LoRA in float32: only trained ones need one dtype.
    """

    def _prepare(self, model, make_optimizer: MakeOptimizer):
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import OffloadPolicy, fully_shard

        plugin, device = FullyShardedDataParallelPlugin(), self.accelerator.device.type
        transformer = model.transformer
        _autocast(transformer, device, self._dtype)
        how = {
            "mesh": init_device_mesh(device, (self.accelerator.num_processes,)),
            "offload_policy": plugin.cpu_offload or OffloadPolicy(),
        }
        names = model.block_class.split(",")
        blocks = [module for module in transformer.modules() if type(module).__name__ in names]
        assert blocks, f"{type(transformer).__name__} has no {model.block_class}"
        for block in blocks:
            fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **how)
        fully_shard(transformer, **how)
        optimizer = make_optimizer(trained(transformer))
        return transformer, self.accelerator.prepare_optimizer(optimizer)

    @torch.no_grad()
    def local(self, parameter: nn.Parameter) -> Tensor:
        return parameter.to_local()

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, local: Tensor | None = None) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor):  # a buffer
            return parameter.detach()
        if local is None or isinstance(local, DTensor):
            return (parameter if local is None else local).full_tensor()
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        return self._own(parameter, whole).to_local()

    def _own_moment(self, index: int, whole: Tensor) -> Tensor:
        return self._own(self.parameters[index], whole)

    def _own(self, parameter: nn.Parameter, whole: Tensor):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            whole.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            src_data_rank=None,  # every rank has the whole: nothing to send
        )

    def before_swap(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        # The outermost group stays gathered after a forward, and would hide what is written.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def accumulate(self, *, sync: bool):
        # What waits for its sum is whole on every rank: little of a LoRA, else a whole model.
        self.module.set_requires_gradient_sync(sync or not self._use_lora)
        return nullcontext()

    def _clip(self) -> Tensor:
        self.accelerator.unscale_gradients(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm)
        return norm.full_tensor()


class Zero(Plain):
    """Divide the optimizer state (ZeRO 1) and the gradients (ZeRO 2) over the ranks."""

    def _prepare(self, model, make_optimizer: MakeOptimizer):
        import deepspeed

        _autocast(model.transformer, self.accelerator.device.type, self._dtype)
        given = self.accelerator.deepspeed_plugin.deepspeed_config
        # Its own precisions would cast the LoRA, or send its gradient in half.
        ours = ("bf16", "fp16", "torch_autocast", "train_batch_size", "optimizer", "scheduler")
        settings = {k: v for k, v in given.items() if v != "auto" and k not in ours} | {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        # Else ZeRO 3 replaces every linear layer of the process by one that rounds differently.
        settings["zero_optimization"] = given["zero_optimization"] | {
            "memory_efficient_linear": False
        }
        self._engine, optimizer, _, _ = deepspeed.initialize(
            model=model.transformer,
            optimizer=make_optimizer(trained(model.transformer)),
            config=settings,
        )
        return self._engine, optimizer

    def after_load(self) -> None:
        self.optimizer.refresh_fp32_params()

    def accumulate(self, *, sync: bool):
        self._engine.set_gradient_accumulation_boundary(sync)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> StepResult:
        self._engine.step()
        if self.optimizer.overflow:
            return StepResult(math.nan, skipped=True)
        return StepResult(float(self._engine.get_global_grad_norm()), skipped=False)

    @property
    def _states(self) -> list[dict[str, Tensor]]:
        """Return the state of each of the flat tensors that DeepSpeed optimizes."""
        state = self.optimizer.optimizer.state
        return [state[flat] for flat in self._flat if flat in state]

    @property
    def _flat(self) -> list[Tensor]:
        return self.optimizer.single_partition_of_fp32_groups

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in (self._states[0] if self._states else {}).items():
            for index, parameter in enumerate(self.parameters):
                whole = self._moment(parameter, name) if value.ndim else value.clone()
                yield f"{index}.{name}", whole

    def load_moments(self, moments: Moments) -> None:
        for flat in self._flat if moments else ():
            self.optimizer.optimizer.state[flat] = {
                key.partition(".")[2]: torch.zeros_like(flat) if value.ndim else value.clone()
                for key, value in moments.items()
                if key.startswith("0.")
            }
        for key, value in moments.items():
            index, name = key.split(".", 1)
            if value.ndim:
                self._load_moment(self.parameters[int(index)], name, value.to(self._flat[0].device))

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        whole = torch.zeros(parameter.shape, device=parameter.device)
        for part, own in self._overlap(parameter, name, whole):
            part.copy_(own)
        torch.distributed.all_reduce(whole)
        return whole

    def _load_moment(self, parameter: nn.Parameter, name: str, whole: Tensor) -> None:
        for part, own in self._overlap(parameter, name, whole):
            own.copy_(part)

    def _overlap(self, parameter: nn.Parameter, name: str, whole: Tensor) -> list[tuple]:
        """Return [(part of a whole moment, where this rank has it)], or [] where others have it."""
        place = parameter._hp_mapping
        if place is None:
            return []
        inside, outside = place.lp_fragment_address, place.hp_fragment_address
        flat = self.optimizer.optimizer.state[self._flat[place.param_group_index]][name]
        part = whole.view(-1).narrow(0, inside.start, inside.numel)
        return [(part, flat.narrow(0, outside.start, outside.numel))]


class Zero3(Zero):
    """Divide the weights too; a tensor is whole only while a layer runs."""

    @property
    def _flat(self) -> list[Tensor]:
        return self.optimizer.fp32_partitioned_groups_flat

    def local(self, parameter: nn.Parameter) -> Tensor:
        return parameter.ds_tensor.detach()

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, local: Tensor | None = None) -> Tensor:
        if not hasattr(parameter, "ds_id"):  # a buffer
            return parameter.detach()
        own = parameter.ds_tensor if local is None else local
        parts = [torch.empty_like(own) for _ in range(self.accelerator.num_processes)]
        torch.distributed.all_gather(parts, own.contiguous())
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        own = parameter.ds_tensor
        rank, size = self.accelerator.process_index, own.numel()
        part, found = torch.zeros_like(own), whole.flatten()[rank * size : (rank + 1) * size]
        part[: len(found)] = found
        return part

    def before_swap(self) -> None:
        self._engine.empty_partition_cache()  # what is still whole would hide what is written

    def _moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, name)

    def _load_moment(self, parameter: nn.Parameter, name: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, whole, name)


def _autocast(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Let a module's forward run under autocast, as accelerate does for DDP."""
    if dtype == torch.float32:
        return
    forward = module.forward

    @functools.wraps(forward)
    def under_autocast(*args, **kwargs):
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs)

    module.forward = under_autocast
