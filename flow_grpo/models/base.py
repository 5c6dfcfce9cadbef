"""Define what the rest of the project asks of a model: `velocity(x, sigma, cond)` and its I/O."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flow_grpo.images import content_digest, open_image
from flow_grpo.models.loading import half_precision_dtype


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
    """

    pipeline_class: str  # name in diffusers
    family: str  # tag of the model card
    lora_targets: tuple[str, ...]
    block_class: str  # the repeated block, for FSDP and compilation; several: by commas
    negative: str | None = ""  # of the unguided branch; None: guidance is a number it is told
    no_fp16: str = ""  # why the family cannot run in fp16, if it cannot
    takes_images: bool = False  # every prompt comes with a reference image
    pipeline: object  # the loaded diffusers pipeline
    dtype: torch.dtype  # of the frozen transformer weights
    max_sequence_length: int  # tokens of a prompt

    @classmethod
    def check_config(cls, config) -> None:
        """Raise ValueError for a setting that the family cannot do; needs no model."""
        half_precision_dtype(config.mixed_precision, no_fp16=cls.no_fp16)

    @classmethod
    @abstractmethod
    def load(cls, config, device: torch.device) -> "FlowModel":
        """Load the real pipeline named by `config.pretrained`; the only I/O of an adapter.

        Raises:
            ValueError: the path does not exist or holds another family's pipeline.
        """

    @property
    @abstractmethod
    def transformer(self) -> nn.Module:
        """Return the module that is trained."""

    @abstractmethod
    def check_size(self, size: tuple[int, int]) -> None:
        """Raise ValueError, naming the nearest valid size, if the family cannot do `size`."""

    @abstractmethod
    def encode(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence | None = None,
        *,
        size: tuple[int, int],
        negative: str | None,
    ) -> Cond:
        """Encode prompts, one a forward, padded to a length that is fixed for the run.

        Args:
            module: the trained module, for families whose condition needs it.
            prompts: b texts.
            images: b reference images (PIL, RGB) for families that take them.
            size: of the image to make.
            negative: text of the unguided branch; None without classifier-free guidance.
        """

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

    @abstractmethod
    def velocity(
        self, module: nn.Module, x: Tensor, sigma: Tensor, cond: Cond, guidance_scale: float
    ) -> Tensor:
        """Return noise - data (b, *latent), float32.

        Args:
            module: the transformer, perhaps wrapped.
            x: (b, *latent).
            sigma: (b,) float32.
            cond: b samples.
            guidance_scale: above 1, classifier-free guidance inside one forward of 2b.
        """

    def stock(
        self,
        prompts: Sequence[str],
        x: Tensor,
        images: Sequence | None = None,
        *,
        size: tuple[int, int],
        num_steps: int,
        guidance_scale: float,
    ) -> Tensor:
        """Return x_0 (b, *latent), float32, from x at sigma 1 by the unpatched pipeline's call."""
        return self.pipeline(
            prompt=list(prompts),
            latents=x.to(self.dtype),
            height=size[0],
            width=size[1],
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            max_sequence_length=self.max_sequence_length,
            output_type="latent",
        ).images.float()

    @abstractmethod
    def encode_images(self, images: Tensor) -> Tensor:
        """Return x_0 (b, *latent) of images (b, 3, h, w) in [0, 1]."""

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """Return images (b, 3, h, w) in [0, 1], float32, of x_0 (b, *latent)."""

    @abstractmethod
    def offload_text_encoders(self) -> None:
        """Move the text encoders to the CPU."""


class PromptCache:
    """Encode every prompt once and keep the result in host memory, newest `max_size`."""

    def __init__(self, model: FlowModel, module, *, size, negative: str | None, max_size: int):
        self._model, self._module = model, module
        self._size, self._negative, self._max_size = size, negative, max_size
        self._conds: OrderedDict[tuple[str, str | None], Cond] = OrderedDict()
        self.num_encoded = 0  # forwards so far

    def __call__(
        self,
        prompts: Sequence[str],
        device: torch.device | str,
        images: Sequence[Path] | None = None,
    ) -> Cond:
        """Return the conditions of `prompts` on `device`, in order, repeats shared.

        `images` are the files of their reference images, for families that take them; files of
        one content are one image.
        """
        keyed = _keyed(prompts, images)
        place = {key: i for i, key in enumerate(dict(keyed))}
        cond = Cond.cat([self._one(key, path) for key, path in dict(keyed).items()]).to(device)
        return cond.index(torch.tensor([place[key] for key, _ in keyed], device=device))

    def fill(self, prompts: Sequence[str], images: Sequence[Path] | None = None) -> None:
        """Encode all of `prompts` now and make room for them beside what is there."""
        keyed = dict(_keyed(prompts, images))
        self._max_size = max(self._max_size, len({*self._conds, *keyed}))
        for key, path in keyed.items():
            self._one(key, path)

    def _one(self, key: tuple[str, str | None], path: Path | None) -> Cond:
        if key in self._conds:
            self._conds.move_to_end(key)
            return self._conds[key]
        images = None if path is None else [open_image(path)]
        with torch.no_grad():
            cond = self._model.encode(
                self._module, [key[0]], images, size=self._size, negative=self._negative
            )
        self.num_encoded += 1
        cond = self._sharing_storage(cond.to("cpu"))
        self._conds[key] = cond
        if len(self._conds) > self._max_size:
            self._conds.popitem(last=False)
        return cond

    def _sharing_storage(self, cond: Cond) -> Cond:
        """Let what equals the newest prompt's tensors (the negative's do) be those, no copies."""
        newest = self._conds[next(reversed(self._conds))].tensors if self._conds else {}
        shared = {name: old for name, old in newest.items() if torch.equal(old, cond[name])}
        return Cond(cond.tensors | shared)


def _keyed(prompts: Sequence[str], images: Sequence[Path] | None) -> list[tuple]:
    """Return ((prompt, content of its image), its file) of each prompt; None without images."""
    paths = [None] * len(prompts) if images is None else images
    digests = [None if path is None else content_digest(path) for path in paths]
    return [
        ((prompt, digest), path)
        for prompt, digest, path in zip(prompts, digests, paths, strict=True)
    ]
