"""Adapt Qwen-Image-Edit-2509 and -2511 (`QwenImageEditPlusPipeline`): one to three images.

As `qwenimage_edit`, but for the text encoder, which sees smaller copies (384 * 384 pixels) after
the words "Picture 1:", and so on. All prompts of a set must have the same number of images.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models import qwenimage_edit
from flow_grpo.models.base import FlowModel
from flow_grpo.models.qwenimage import QwenImage
from flow_grpo.models.qwenimage_edit import PUBLISHED_RESOLUTION, reference_size, resized


@final
class QwenImageEditPlus(FlowModel):
    """As `qwenimage_edit.QwenImageEdit`, with several reference images.

    The transformer of -2511 gives their tokens the time 0 (`zero_cond_t` in its configuration).
    """

    pipeline_class = "QwenImageEditPlusPipeline"
    family = "qwen-image"
    block_class = QwenImage.block_class
    lora_targets = QwenImage.lora_targets
    max_tokens = QwenImage.max_tokens  # beside those of the images
    negative = QwenImage.negative
    guide = staticmethod(QwenImage.guide)
    no_fp16 = QwenImage.no_fp16
    max_images = 3
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
        qwenimage_edit.check_reference_resolution(config.reference_resolution)

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Load the processor first, to say what it needs before anything large is read."""
        processor = qwenimage_edit.load_processor(path, config.pretrained.revision)
        return {"processor": processor}

    @classmethod
    def own_settings(cls, config) -> dict:
        return {"reference_resolution": config.reference_resolution}

    def check_size(self, size: tuple[int, int]) -> None:
        super().check_size(size)
        reference_size(self.reference_resolution, size)

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        stock = qwenimage_edit.stock_module(self.pipeline)
        height, width = reference_size(self.reference_resolution, size)
        seen = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        copies = resized(self.pipeline, images, (height, width))
        copies = resized(self.pipeline, copies, seen[::-1])
        return qwenimage_edit.encode_text(self.pipeline, text, copies, self.max_sequence_length)

    def encode_references(self, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return latents (1, n, h'/16, w'/16, 64) of n images, in the transformer's dtype."""
        size = reference_size(self.reference_resolution, size)
        return qwenimage_edit.encode_references(self.pipeline, images, size, self.dtype)

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        return qwenimage_edit.run(module, x, sigma, cond, self.dtype)

    def stock(
        self,
        prompts: Sequence[str],
        x: Tensor,
        images: Sequence[Sequence] | None = None,
        **settings,
    ) -> Tensor:
        """As the base's, one prompt a call."""
        with qwenimage_edit.stock_call(self.pipeline, self.reference_resolution):
            return qwenimage_edit.one_by_one(super().stock, prompts, x, images, **settings)

    def stock_references(self, images: Sequence[Sequence], size: tuple[int, int]) -> dict:
        size = reference_size(self.reference_resolution, size)
        return {"image": resized(self.pipeline, images[0], size)}

    def stock_setup(self) -> str:
        return qwenimage_edit.stock_setup(self.pipeline, self.reference_resolution)

    def stock_reference_code(self, size: tuple[int, int]) -> str:
        size = reference_size(self.reference_resolution, size)
        one = qwenimage_edit.image_code(size, "name")
        names = '["IMAGE"]  # as many as in training'
        return f"image=[\n        {one}\n        for name in {names}\n    ],"
