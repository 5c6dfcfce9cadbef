"""Own the trained weights: adapter or full, wrapped for the launcher, with their alternatives.

What differs between LoRA and full training, current, average, old and reference weights ends in
this file; what differs between one process, DDP, FSDP and ZeRO in `backends.py`, which only this
file uses.
"""

import math
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flow_grpo import backends, lora, seeds
from flow_grpo.backends import StepResult
from flow_grpo.ema import Ema
from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.settings import image_size

WEIGHTS = ("current", "reference", "old", "ema")
MAX_SKIPPED_STEPS = 5  # in a row, by the gradient scaler


class Policy:
    """Trained transformer of a model, with its optimizer, average and reference."""

    def __init__(
        self,
        model: FlowModel,
        config,
        accelerator,
        *,
        keeps: frozenset[str] = frozenset(("reference",)),
    ):
        """Add the adapter (or unfreeze everything), freeze what gets no gradient, and wrap.

        `keeps` names the other weights that will be asked for: "reference", "old".
        """
        self.model, self.accelerator = model, accelerator
        self.use_lora = config.use_lora
        self._train = config.train
        transformer = model.transformer
        if self.use_lora:
            self._add_lora(config)
        else:
            transformer.requires_grad_(True)
        if config.train.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        self.frozen = self._freeze_unused(image_size(config))
        self.names = [name for name, p in transformer.named_parameters() if p.requires_grad]
        self.num_parameters = sum(p.numel() for p in transformer.parameters())
        self._shapes = [p.shape for p in backends.trained(transformer)]
        self.num_trained = sum(shape.numel() for shape in self._shapes)
        self._backend = backends.wrap(accelerator, model, config, self._make_optimizer)
        self.module, self.optimizer = self._backend.module, self._backend.optimizer
        self.module.eval()  # the published models have no dropout; replay must match rollout
        self.parameters = self._backend.parameters
        self.ema = Ema(self.tensors, config.train.ema_decay) if config.train.ema else None
        self._start = self._copy() if "reference" in keeps and not self.use_lora else None
        self.old = self._copy() if "old" in keeps else None
        self._aside: dict[str, list[Tensor]] = {}  # current weights while others are in place
        self._skipped_in_a_row = 0

    def _make_optimizer(self, parameters) -> torch.optim.Optimizer:
        train = self._train
        return torch.optim.AdamW(
            parameters,
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.adam_weight_decay,
            eps=train.adam_epsilon,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Return this rank's part of every trained parameter, sharing its storage."""
        return [self._backend.local(p) for p in self.parameters]

    def _copy(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.tensors]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the whole shape of every trained parameter, by name."""
        return dict(zip(self.names, self._shapes, strict=True))

    @property
    def alternatives(self) -> dict[str, list[Tensor]]:
        """Return the tensors besides the trained ones that a run resumes from, by name."""
        average = None if self.ema is None else self.ema.tensors
        named = {"ema": average, "old": self.old}
        return {name: tensors for name, tensors in named.items() if tensors is not None}

    def velocity(
        self,
        x: Tensor,
        sigma: Tensor,
        cond: Cond,
        guidance_scale: float,
        *,
        weights: str = "current",
        replay: bool = False,
    ) -> Tensor:
        """Return noise - data (b, *latent), float32.

        Args:
            x: (b, *latent).
            sigma: (b,) float32.
            cond: b samples.
            guidance_scale: above 1, classifier-free guidance.
            weights: one of `WEIGHTS`; reference = adapter off, or the start weights. Those of
                others than the current ones are detached, and must be asked for before the
                forward that is to have a gradient.
            replay: run the graph that training runs, and detach: a rollout step that will be
                trained must see exactly the numbers that the update sees.
        """
        if not replay:
            grad = weights == "current" and torch.is_grad_enabled()
            with self.weights(weights), torch.set_grad_enabled(grad):
                return self.model.velocity(self.module, x, sigma, cond, guidance_scale)
        with self.weights(weights), torch.enable_grad(), self.accumulate(sync=False):
            return self.model.velocity(self.module, x, sigma, cond, guidance_scale).detach()

    @contextmanager
    def weights(self, name: str):
        """Run a block with other weights in place of the current ones."""
        if name not in WEIGHTS:
            raise ValueError(f"weights ({name!r}) must be one of {', '.join(WEIGHTS)}")
        if name == "reference" and self.use_lora:
            with self._adapter_off():
                yield
            return
        if name == "current":
            yield
            return
        average = self.ema and self.ema.tensors
        tensors = {"ema": average, "old": self.old, "reference": self._start}[name]
        if tensors is None:
            hint = "set train.ema" if name == "ema" else "the algorithm does not name them"
            raise ValueError(f"there are no {name!r} weights: {hint}")
        if name not in self._aside:
            self._aside[name] = self._copy()
        torch._foreach_copy_(self._aside[name], self.tensors)
        self.assign(tensors)
        try:
            yield
        finally:
            self.assign(self._aside[name])

    @contextmanager
    def _adapter_off(self):
        """Switch the adapter off; peft would unfreeze all of it when it comes back on."""
        transformer = self.model.transformer
        flags = [(p, p.requires_grad) for p in transformer.parameters()]
        transformer.disable_adapters()
        try:
            yield
        finally:
            transformer.enable_adapters()
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    @torch.no_grad()
    def assign(self, tensors: list[Tensor]) -> None:
        """Copy `tensors`, shaped as this rank's parts, into the trained parameters, in place."""
        self._backend.before_swap()
        torch._foreach_copy_(self.tensors, tensors)

    @torch.no_grad()
    def renew_old(self, decay: float) -> None:
        """Make the old weights decay * old + (1 - decay) * current, if there are some."""
        if self.old is not None and decay < 1:
            torch._foreach_lerp_(self.old, self.tensors, 1 - decay)

    def accumulate(self, *, sync: bool):
        """Return the context of a forward and backward; only the last of an update syncs."""
        return self._backend.accumulate(sync=sync)

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradient, inside `accumulate`; ranks' gradients are averaged."""
        self._backend.backward(loss)

    def step(self, update: int, learning_rate: float) -> StepResult:
        """Clip, step, average. `update` counts the optimizer steps so far.

        Raises:
            FloatingPointError: the gradient is not finite, or the scaler skipped five in a row.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        result = self._backend.step()
        if self.accelerator.scaler is None and not math.isfinite(result.grad_norm):
            raise FloatingPointError(
                f"gradient norm is {result.grad_norm} at update {update}; weights are unchanged. "
                "Look at train/ratio_mean and the rewards of this epoch; try a lower "
                "learning_rate, bf16 in place of fp16, or a window without the last, low-noise "
                "steps"
            )
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise FloatingPointError(
                f"{MAX_SKIPPED_STEPS} optimizer steps in a row had gradients beyond fp16's range "
                f"at update {update}; try bf16 or a lower learning_rate"
            )
        if self.ema is not None and not result.skipped:
            self.ema.update(self.tensors, update)
        return result

    def exported(self) -> dict[str, Tensor]:
        """Return what a checkpoint publishes, whole, on the CPU; all ranks must call it.

        It is the adapter with alpha folded in, or the transformer, with average weights if there
        are some. What other processes than the main one get is of no use.
        """
        transformer = self.model.transformer
        with self.weights("ema" if self.ema else "current"):
            if self.use_lora:
                return lora.export_state(transformer, self._backend.whole)
            named = transformer.state_dict(keep_vars=True)
            return self._gathered({name: (p, None) for name, p in named.items()})

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return all that a run resumes from, whole, on the CPU; all ranks must call it.

        It is {"parameters", "ema", "old": {name: tensor}, "optimizer": {index.moment: tensor}}, the
        same for any back-end and number of ranks. Elsewhere than on the main process it is empty.
        """
        named = list(zip(self.names, self.parameters, strict=True))
        state = {"parameters": self._gathered({name: (p, None) for name, p in named})}
        for kind, tensors in self.alternatives.items():
            parts = zip(named, tensors, strict=True)
            state[kind] = self._gathered({name: (p, local) for (name, p), local in parts})
        state["optimizer"] = {}
        for name, moment in self._backend.moments():  # together they may not fit on a device
            if self._is_main:
                state["optimizer"][name] = moment.cpu()
        return state

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process

    def _gathered(self, named: dict[str, tuple]) -> dict[str, Tensor]:
        """Return the whole of every (parameter, this rank's part or None), on the main process."""
        found = {}
        for name, (parameter, local) in named.items():
            whole = self._backend.whole(parameter, local)
            if self._is_main:
                found[name] = whole.detach().to("cpu", copy=True).contiguous()
        return found

    @torch.no_grad()
    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `state` returned; names and shapes must be this policy's."""
        for kind, named in state.items():
            if kind == "optimizer":
                self._backend.load_moments(named)
                continue
            wholes = zip(self.parameters, (named[name] for name in self.names), strict=True)
            parts = [self._backend.part(p, whole) for p, whole in wholes]
            if kind == "parameters":
                self.assign(parts)
                self._backend.after_load()
            else:
                torch._foreach_copy_(self.alternatives[kind], parts)

    def _add_lora(self, config) -> None:
        with torch.random.fork_rng(devices=[]):
            seed = seeds.generator(config.seed, seeds.ADAPTER_INIT).initial_seed()
            torch.random.default_generator.manual_seed(seed)
            lora.add(
                self.model.transformer,
                targets=self.model.lora_targets,
                rank=config.train.lora_rank,
                alpha=config.train.lora_alpha,
            )
        if config.train.lora_path:
            lora.load(self.model.transformer, config.train.lora_path)

    def _freeze_unused(self, size: tuple[int, int]) -> list[str]:
        """Freeze and return the parameters that one probe backward gives no gradient."""
        model, transformer = self.model, self.model.transformer
        device = next(transformer.parameters()).device
        x = seeds.normal((1, *model.latent_shape(size)), 0, seeds.EVAL_NOISE).to(device)
        images = None
        if model.max_images:
            from PIL import Image

            images = [(Image.new("RGB", size[::-1]),)]
        cond = model.encode(transformer, [""], images, size=size, negative=None)
        sigma = torch.full((1,), 0.5, device=device)
        used: set[nn.Parameter] = set()

        def note(parameter: nn.Parameter) -> None:
            used.add(parameter)
            parameter.grad = None  # all of them may not fit on a device: nothing is divided yet

        hooks = [p.register_post_accumulate_grad_hook(note) for p in backends.trained(transformer)]
        with torch.enable_grad():
            model.velocity(transformer, x, sigma, cond, 1.0).square().mean().backward()
        for hook in hooks:
            hook.remove()
        unused = {
            name: p
            for name, p in transformer.named_parameters()
            if p.requires_grad and p not in used
        }
        for parameter in unused.values():
            parameter.requires_grad_(False)
        return list(unused)
