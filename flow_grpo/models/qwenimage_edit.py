"""Adapt Qwen-Image-Edit (`QwenImageEditPipeline`): text encoder and transformer see an image.

The stock pipeline resizes an image to edit to 1024 * 1024 pixels, in the image's own shape. Here it
gets the shape of the image to make, so that all samples of a run have as many tokens, and
`reference_resolution` squared pixels, since tokens are paid for in every forward. The result is the
stock pipeline's for an image that has this size already, which `reference_size` returns.
"""

import contextlib
import copy
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models import qwenimage
from flow_grpo.models.base import FlowModel
from flow_grpo.models.qwenimage import QwenImage

logger = logging.getLogger(__name__)

PUBLISHED_RESOLUTION = 1024  # of the stock pipelines; side of a square of the same area
ROUNDING = 32  # height and width of a reference image are multiples of it
SETUP = """\
import {module} as stock

dimensions = stock.calculate_dimensions  # of reference images, whose area is a constant there
stock.calculate_dimensions = lambda area, ratio: dimensions(
    {side} * {side} if area == {published} * {published} else area, ratio
)
"""


@final
class QwenImageEdit(FlowModel):
    """As `qwenimage.QwenImage`, with tokens of a reference image after those of the one to make."""

    pipeline_class = "QwenImageEditPipeline"
    family = "qwen-image"
    block_class = QwenImage.block_class
    lora_targets = QwenImage.lora_targets
    max_tokens = QwenImage.max_tokens  # beside those of the image
    negative = QwenImage.negative
    guide = staticmethod(QwenImage.guide)
    no_fp16 = QwenImage.no_fp16
    max_images = 1
    task = "image-to-image"

    size_unit = QwenImage.size_unit
    latent_shape = QwenImage.latent_shape
    sigmas = QwenImage.sigmas
    stock_settings = QwenImage.stock_settings
    stock_latents = QwenImage.stock_latents
    encode_images = QwenImage.encode_images
    decode = QwenImage.decode

    def __init__(
        self,
        pipeline,
        device: torch.device,
        *,
        max_sequence_length: int,
        reference_resolution: int = PUBLISHED_RESOLUTION,
    ):
        """Wrap a loaded pipeline; reference images get `reference_resolution` squared pixels."""
        super().__init__(pipeline, device, max_sequence_length=max_sequence_length)
        self.reference_resolution = reference_resolution

    @classmethod
    def check_config(cls, config) -> None:
        super().check_config(config)
        check_reference_resolution(config.reference_resolution)

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Load the processor first, to say what it needs before anything large is read."""
        return {"processor": load_processor(path, config.pretrained.revision)}

    @classmethod
    def own_settings(cls, config) -> dict:
        return {"reference_resolution": config.reference_resolution}

    def check_size(self, size: tuple[int, int]) -> None:
        super().check_size(size)
        reference_size(self.reference_resolution, size)

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        (image,) = resized(self.pipeline, images, reference_size(self.reference_resolution, size))
        return encode_text(self.pipeline, text, image, self.max_sequence_length)

    def encode_references(self, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return latents (1, 1, h'/16, w'/16, 64) of the image, in the transformer's dtype."""
        size = reference_size(self.reference_resolution, size)
        return encode_references(self.pipeline, images, size, self.dtype)

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        return run(module, x, sigma, cond, self.dtype)

    def stock(
        self,
        prompts: Sequence[str],
        x: Tensor,
        images: Sequence[Sequence] | None = None,
        **settings,
    ) -> Tensor:
        """As the base's, one prompt a call."""
        with stock_call(self.pipeline, self.reference_resolution):
            return one_by_one(super().stock, prompts, x, images, **settings)

    def stock_references(self, images: Sequence[Sequence], size: tuple[int, int]) -> dict:
        size = reference_size(self.reference_resolution, size)
        (image,) = resized(self.pipeline, images[0], size)
        return {"image": image}

    def stock_setup(self) -> str:
        return stock_setup(self.pipeline, self.reference_resolution)

    def stock_reference_code(self, size: tuple[int, int]) -> str:
        return f"image={image_code(reference_size(self.reference_resolution, size))},"


def check_reference_resolution(side: int) -> None:
    """Raise ValueError for a resolution that no reference image can have."""
    if side < ROUNDING:
        raise ValueError(
            f"reference_resolution ({side}) must be at least {ROUNDING}; "
            f"published: {PUBLISHED_RESOLUTION}"
        )


def load_processor(path: str, revision: str):
    """Return a pipeline's processor of texts with images.

    Raises:
        ValueError: it is missing, or cannot be made here.
    """
    try:
        from transformers import Qwen2VLProcessor

        return Qwen2VLProcessor.from_pretrained(path, subfolder="processor", revision=revision)
    except (ImportError, OSError) as error:
        without = importlib.util.find_spec("torchvision") is None and "video" in str(error)
        if isinstance(error, ImportError) or without:
            raise ValueError(
                "the processor of Qwen-Image-Edit needs torchvision, made for the torch that is "
                f"installed ({torch.__version__}): pip install -e '.[edit]'"
            ) from error
        raise ValueError(f"cannot load {path}, a file is missing or broken: {error}") from error


def reference_size(side: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return about side * side pixels in the shape of `size`, (height, width).

    It is rounded as the pipelines round it. That changes the shape, so it is repeated until
    nothing changes any more: an image of this size is not resized by them.

    Raises:
        ValueError: a side would be 0.
    """
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    height, width = size
    while True:
        found = calculate_dimensions(side * side, width / height)
        if 0 in found:
            raise ValueError(
                f"reference_resolution ({side}) is too small for images as long as {size[0]} x "
                f"{size[1]}; try {2 * side}"
            )
        if found == (width, height):
            return height, width
        width, height = found


def resized(pipeline, images: Sequence, size: tuple[int, int]) -> list:
    """Return PIL images resized to `size` (height, width)."""
    return [pipeline.image_processor.resize(image, *size) for image in images]


def encode_text(pipeline, text: str, images, length: int) -> dict[str, Tensor]:
    """Return embeddings of a text and its images, padded.

    Args:
        pipeline: whose `encode_prompt` and processor are asked.
        text: a prompt or a negative.
        images: an image (PIL) or a list of images of one size, as the pipeline takes them.
        length: of what is not a token of an image.
    """
    embeds, mask = pipeline.encode_prompt(text, image=images, device=pipeline.text_encoder.device)
    assert mask is None, "one prompt by itself has no padding"
    several = images if isinstance(images, list) else [images]
    processor = pipeline.processor.image_processor
    patches = processor.get_number_of_image_patches(*several[0].size[::-1], {})
    beside = len(several) * (patches // processor.merge_size**2)
    if embeds.shape[1] - beside > length:
        logger.warning(
            "a prompt of %d tokens is cut off after %d (sample.max_sequence_length): %s",
            embeds.shape[1] - beside, length, text,
        )  # fmt: skip
    return qwenimage.padded(embeds, length + beside)


def encode_references(
    pipeline, images: Sequence, size: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return latents (1, n, h/16, w/16, 64) of n reference images resized to `size`."""
    pixels = [
        pipeline.image_processor.preprocess(image, *size)
        for image in resized(pipeline, images, size)
    ]
    device = next(pipeline.vae.parameters()).device
    latents = qwenimage.encode_images(pipeline.vae, torch.cat(pixels).to(device) / 2 + 0.5)
    return {"references": latents.to(dtype).unsqueeze(0)}


def run(
    module: nn.Module, x: Tensor, sigma: Tensor, cond: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Run the transformer on x and its reference images; return the velocity (b, *latent)."""
    references = cond["references"]  # (b, n, rows, columns, channels)
    grid, num_tokens = x.shape[1:3], x.shape[1] * x.shape[2]
    tokens = torch.cat([x.flatten(1, 2).to(dtype), references.flatten(1, 3).to(dtype)], dim=1)
    grids = [(1, *grid), *[(1, *references.shape[2:4])] * references.shape[1]]
    output = qwenimage.run(module, tokens, grids, sigma, cond)
    return output[:, :num_tokens].unflatten(1, grid)


def one_by_one(stock, prompts: Sequence[str], x: Tensor, images, **settings) -> Tensor:
    """Return what `FlowModel.stock` gives, one prompt a call."""
    rows = zip(prompts, x.split(1), images, strict=True)
    return torch.cat([stock([text], row, [own], **settings) for text, row, own in rows])


def stock_module(pipeline):
    """Return the module that defines a pipeline's class."""
    return sys.modules[type(pipeline).__module__]


@contextlib.contextmanager
def stock_call(pipeline, side: int) -> Iterator[None]:
    """Within, let the pipeline's own call make reference images as the adapter does.

    Their area is a constant in the pipeline's module, so a function there is another unless `side`
    is the published one; their pixels get the text encoder's dtype, so a copy of the autoencoder
    has that too.
    """
    module, vae, dtype = stock_module(pipeline), pipeline.vae, pipeline.text_encoder.dtype
    dimensions, published = module.calculate_dimensions, PUBLISHED_RESOLUTION**2

    def changed(area: int, ratio: float):
        return dimensions(side * side if area == published else area, ratio)

    try:
        if side != PUBLISHED_RESOLUTION:
            module.calculate_dimensions = changed
        pipeline.vae = vae if vae.dtype == dtype else copy.deepcopy(vae).to(dtype)
        yield
    finally:
        module.calculate_dimensions = dimensions
        pipeline.vae = vae


def stock_setup(pipeline, side: int) -> str:
    """Return the lines of a model card that change the area as `stock_call` does."""
    if side == PUBLISHED_RESOLUTION:
        return ""
    module = stock_module(pipeline).__name__
    return SETUP.format(module=module, side=side, published=PUBLISHED_RESOLUTION)


def image_code(size: tuple[int, int], name: str = '"IMAGE"') -> str:
    """Return code of a model card that reads a reference image of `size`."""
    height, width = size
    resized = f"resize(({width}, {height}), PIL.Image.Resampling.LANCZOS)"
    return f'PIL.Image.open({name}).convert("RGB").{resized}'
