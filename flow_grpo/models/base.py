"""Define what the rest of the project asks of a model: `velocity(x, sigma, cond)` and its I/O."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flow_grpo.guidance import classifier_free
from flow_grpo.models.loading import half_precision_dtype, load_pipeline

NEGATIVE = "negative_"  # before the name of a condition: that of the unguided branch


@dataclass(frozen=True)
class Cond:
    """Hold what a velocity is conditioned on: named tensors whose first axis is the sample."""

    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def index(self, rows: Tensor | slice) -> "Cond":
        """Return the samples `rows` (int64 indices, repeats allowed, or a slice)."""
        return Cond({name: tensor[rows] for name, tensor in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Cond":
        """Return a copy on `device`, complete on return where that is the CPU."""
        overlap = torch.device(device).type != "cpu"  # else the host would read a copy in flight
        return Cond({name: t.to(device, non_blocking=overlap) for name, t in self.tensors.items()})

    @staticmethod
    def cat(conds: Sequence["Cond"]) -> "Cond":
        """Concatenate along the sample axis."""
        return Cond({name: torch.cat([c[name] for c in conds]) for name in conds[0].tensors})


class FlowModel(ABC):
    """Adapt one model family; every subclass is final.

    Sizes are `(height, width)` in pixels, velocities are `noise - data`, sigmas run from 1 to 0.
    A family states the data below and writes the methods that are abstract; the others are what
    most diffusers pipelines need, to be replaced where a family differs.
    """

    pipeline_class: str  # name in diffusers
    family: str  # tag of the model card
    lora_targets: tuple[str, ...]
    block_class: str  # the repeated block, for FSDP and compilation; several: by commas
    text_encoders: tuple[str, ...] = ("text_encoder",)  # parts of the pipeline; may be None there
    max_tokens: int = 512  # largest `sample.max_sequence_length`, the stock pipeline's
    min_tokens: int = 1
    negative: str | None = ""  # of the unguided branch; None: guidance is a number it is told
    guide = staticmethod(classifier_free)  # combines the branches: (negative, positive, scale)
    no_fp16: str = ""  # why the family cannot run in fp16, if it cannot
    mixed_gradients: bool = False  # attentions of one shape get gradients in several layouts
    max_images: int = 0  # reference images of a prompt, at least 1 if not 0
    task: str = "text-to-image"  # as model hubs call it
    output: str = "images"  # field of the pipeline's output

    def __init__(self, pipeline, device: torch.device, *, max_sequence_length: int):
        """Put a loaded pipeline on `device`, frozen, in evaluation mode.

        Prompts are padded to `max_sequence_length` tokens.
        """
        self.pipeline, self.device = pipeline, torch.device(device)
        self.dtype = pipeline.transformer.dtype  # of the frozen transformer weights
        self.max_sequence_length = max_sequence_length
        self._negatives: dict[str, dict[str, Tensor]] = {}
        pipeline.set_progress_bar_config(disable=True)
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        pipeline.to(self.device)
        if self.mixed_gradients:
            # PyTorch 2.11 finds cuDNN's backward by the shape and not the layout of the gradient,
            # and runs the first one's: wrong gradients, NaN or an illegal access (seen on an H200).
            torch.backends.cuda.enable_cudnn_sdp(False)

    @classmethod
    def check_config(cls, config) -> None:
        """Raise ValueError for a setting that the family cannot do; needs no model."""
        half_precision_dtype(config.mixed_precision, no_fp16=cls.no_fp16)
        length = config.sample.max_sequence_length
        if not cls.min_tokens <= length <= cls.max_tokens:
            raise ValueError(
                f"sample.max_sequence_length ({length}) must be in "
                f"[{cls.min_tokens}, {cls.max_tokens}] for {cls.__name__}"
            )

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Check the pipeline's small files and return more arguments of its `from_pretrained`.

        Args:
            path: folder or hub id.
            index: its model_index.json, of the right class.
            config: of the run.

        Raises:
            ValueError: a variant that the family's adapter cannot do.
        """
        return {}

    @classmethod
    def load(cls, config, device: torch.device) -> "FlowModel":
        """Load the real pipeline named by `config.pretrained`; the only I/O of an adapter.

        Raises:
            ValueError: the path does not exist or holds another family's pipeline.
        """
        cls.check_config(config)
        pipeline, length = load_pipeline(cls, config), config.sample.max_sequence_length
        return cls(pipeline, device, max_sequence_length=length, **cls.own_settings(config))

    @classmethod
    def own_settings(cls, config) -> dict:
        """Return the arguments of `__init__` that only this family has."""
        return {}

    @property
    def transformer(self) -> nn.Module:
        """Return the module that is trained."""
        return self.pipeline.transformer

    @property
    @abstractmethod
    def size_unit(self) -> int:
        """Return what height and width must be multiples of, pixels."""

    @property
    def largest_size(self) -> int | None:
        """Return the largest height and width, pixels; None where there is no limit."""
        return None

    def check_size(self, size: tuple[int, int]) -> None:
        """Raise ValueError, naming the nearest valid size, if the family cannot do `size`."""
        unit, largest = self.size_unit, self.largest_size
        names = ("resolution", "resolution" if size[0] == size[1] else "width")
        for name, length in zip(names, size, strict=True):
            nearest = max(unit, round(length / unit) * unit)
            nearest = nearest if largest is None else min(nearest, largest)
            if length != nearest:
                limit = "" if largest is None else f", at most {largest},"
                raise ValueError(
                    f"{name} ({length}) must be a multiple of {unit}{limit} for this model; "
                    f"nearest valid: {nearest}"
                )

    def encode(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence[Sequence] | None = None,
        *,
        size: tuple[int, int],
        negative: str | None,
    ) -> Cond:
        """Encode prompts, one a forward, padded to a length that is fixed for the run.

        Args:
            module: the trained module, for families whose condition needs it.
            prompts: b texts.
            images: for families that take them, b tuples of 1 to max_images PIL images, RGB.
            size: of the image to make.
            negative: text of the unguided branch; None without classifier-free guidance.
        """
        if images is None:
            assert not self.max_images, f"{type(self).__name__} needs a reference image a prompt"
            images = [()] * len(prompts)
        conds = [
            Cond(self._encode_pair(prompt, references, size, negative))
            for prompt, references in zip(prompts, images, strict=True)
        ]
        return Cond.cat(conds)

    def _encode_pair(self, prompt: str, images: Sequence, size, negative) -> dict[str, Tensor]:
        """Encode a prompt, its negative and what they have in common."""
        assert len(images) <= self.max_images
        tensors = self.encode_text(prompt, images, size)
        tensors |= self.encode_references(images, size) if images else {}
        if negative is None:
            return tensors
        if images:  # the text encoder may look at them
            unguided = self.encode_text(negative, images, size)
        else:
            if negative not in self._negatives:
                self._negatives = {negative: self.encode_text(negative, (), size)}
            unguided = self._negatives[negative]
        return tensors | {NEGATIVE + name: tensor for name, tensor in unguided.items()}

    @abstractmethod
    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return the named conditions (1, ...) that a text gives, padded to a fixed length.

        Args:
            text: a prompt or a negative.
            images: its reference images (PIL, RGB), for text encoders that look at them.
            size: of the image to make.
        """

    def encode_references(self, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return the named conditions (1, ...) that the reference images give by themselves."""
        return {}

    def context(self, module: nn.Module, cond: Cond) -> Cond:
        """Return `cond` with what the trained module adds to it; by default nothing."""
        return cond

    @abstractmethod
    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        """Return one sample's latent shape."""

    def initial_latents(self, num: int, size: tuple[int, int], noise: Tensor) -> Tensor:
        """Return x at sigma = 1 for standard normal `noise` (num, *latent_shape)."""
        assert noise.shape == (num, *self.latent_shape(size))
        return noise

    @abstractmethod
    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        """Return the scheduler's own sigmas (num_steps + 1,), 1 ... 0, float32 on the CPU."""

    def noise_levels(self, num_levels: int, num_steps: int, size: tuple[int, int]) -> Tensor:
        """Return (num_levels,) sigmas, from 1 down, of the schedule that `num_steps` steps have."""
        return self.sigmas(num_levels, size)[:-1]

    def velocity(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, guidance_scale: float
    ) -> Tensor:
        """Return noise - data (b, *latent), float32.

        Args:
            module: the transformer, perhaps wrapped.
            x: (b, *latent).
            sigma: (b,) float32.
            cond: b samples.
            guidance_scale: above 1, classifier-free guidance inside one forward of 2b; or what the
                model is told, where `negative` is None.
        """
        tensors = {name: t for name, t in cond.tensors.items() if not name.startswith(NEGATIVE)}
        if self.negative is None or guidance_scale <= 1.0:
            return self.forward(module, x, sigma, tensors, guidance_scale)
        both = {
            name: torch.cat([cond.tensors.get(NEGATIVE + name, t), t])
            for name, t in tensors.items()
        }
        velocity = self.forward(
            module, torch.cat([x, x]), torch.cat([sigma, sigma]), both, guidance_scale
        )
        return self.guide(*velocity.chunk(2), guidance_scale)

    @abstractmethod
    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer once: noise - data (b, *latent), float32, of one branch a sample.

        `guidance_scale` is for families that are told it.
        """

    @abstractmethod
    def encode_images(self, images: Tensor) -> Tensor:
        """Return x_0 (b, *latent) of images (b, 3, h, w), or clips (b, f, 3, h, w), in [0, 1]."""

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """Return images (b, 3, h, w), or clips (b, f, 3, h, w), in [0, 1], float32, of x_0."""

    def offload_text_encoders(self) -> None:
        """Move the text encoders to the CPU."""
        for name in self.text_encoders:
            if getattr(self.pipeline, name) is not None:
                getattr(self.pipeline, name).to("cpu")

    def stock(
        self,
        prompts: Sequence[str],
        x: Tensor,
        images: Sequence[Sequence] | None = None,
        *,
        size: tuple[int, int],
        num_steps: int,
        guidance_scale: float,
    ) -> Tensor:
        """Return x_0 (b, *latent), float32, from x at sigma 1 by the unpatched pipeline's call."""
        settings = self.stock_settings(guidance_scale)
        if "negative_prompt" in settings:
            settings["negative_prompt"] = [settings["negative_prompt"]] * len(prompts)
        latents = self.pipeline(
            prompt=list(prompts),
            latents=self.stock_latents(x).to(self.dtype),
            height=size[0],
            width=size[1],
            num_inference_steps=num_steps,
            max_sequence_length=self.max_sequence_length,
            output_type="latent",
            return_dict=False,
            **settings,
            **(self.stock_references(images, size) if images else {}),
        )[0]
        return self.own_latents(latents).float().reshape(x.shape)

    def stock_settings(self, guidance_scale: float) -> dict:
        """Return the arguments of the pipeline's call that are this family's own."""
        return {"guidance_scale": guidance_scale}

    def stock_latents(self, x: Tensor) -> Tensor:
        """Return x as the pipeline's call takes it, with the same elements in the same order."""
        return x

    def own_latents(self, latents: Tensor) -> Tensor:
        """Return x_0 of what the pipeline's call returns for output_type="latent"."""
        return latents

    def stock_references(self, images: Sequence[Sequence], size: tuple[int, int]) -> dict:
        """Return the arguments of the pipeline's call for reference images."""
        return {}

    def stock_setup(self) -> str:
        """Return lines of the model card that make `pipe` sample as this adapter does."""
        return ""

    def stock_reference_code(self, size: tuple[int, int]) -> str:
        """Return the arguments, as in a model card, of the pipeline's call for IMAGE."""
        return ""
