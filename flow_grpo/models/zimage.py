"""Adapt Z-Image (`ZImagePipeline`): prompts of different lengths, data - noise at 1 - sigma."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models.autoencoders import decode_shifted, encode_shifted
from flow_grpo.models.base import FlowModel
from flow_grpo.models.qwenimage import padded
from flow_grpo.models.schedulers import scheduler_sigmas
from flow_grpo.models.tokens import PATCH

LENGTH_UNIT = 32  # the transformer fills a prompt up to a multiple of this with tokens of its own


@final
class ZImage(FlowModel):
    """Latents (16, h/8, w/8), time 1 - sigma, classifier-free guidance in one batch.

    A guidance scale of 1 is none, as for every family here: one more than the pipeline's own
    number, which counts from 0. The pipeline's `cfg_normalization` and `cfg_truncation` are not
    offered; their defaults change nothing.
    """

    pipeline_class = "ZImagePipeline"
    family = "z-image"
    block_class = "ZImageTransformerBlock"
    no_fp16 = "Z-Image was published in bf16, and no run in fp16 is known to us"
    lora_targets = (
        "attention.to_k",
        "attention.to_out.0",
        "attention.to_q",
        "attention.to_v",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
    )

    @property
    def size_unit(self) -> int:
        return PATCH * self.pipeline.vae_scale_factor

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        (embeds,), _ = self.pipeline.encode_prompt(
            text,
            device=self.pipeline.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return padded(embeds[None], self.max_sequence_length)

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return (self.transformer.config.in_channels, size[0] // factor, size[1] // factor)

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        num_tokens = (size[0] // self.size_unit) * (size[1] // self.size_unit)
        return scheduler_sigmas(
            self.pipeline.scheduler, num_steps, num_tokens=num_tokens, linear=True
        )

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer on prompts without padding, and one sample that sets the shape.

        It sees only a prompt's own tokens (their number is read by the host: one synchronisation
        a forward) and pads a batch to its longest. A last sample, longer than any prompt can be,
        makes that length and the mask the same in every batch; without it a sample's numbers
        would depend on the others, and differ between rollout and update.
        """
        embeds = cond["prompt_embeds"].to(self.dtype)
        lengths = cond["prompt_mask"].sum(1).tolist()
        longest = embeds.new_zeros(self.max_sequence_length + LENGTH_UNIT, embeds.shape[-1])
        latents = x.to(self.dtype).unsqueeze(2)  # an image is a clip of one frame
        time = (1000 - sigma * 1000) / 1000  # in float32, as the pipeline's
        data_minus_noise = module(
            [*latents, torch.zeros_like(latents[0])],
            torch.cat([time, time[:1]]),
            [*(e[:n] for e, n in zip(embeds, lengths, strict=True)), longest],
            return_dict=False,
        )[0][:-1]
        return -torch.stack(data_minus_noise).squeeze(2).float()

    def stock_settings(self, guidance_scale: float) -> dict:
        return {"guidance_scale": max(0.0, guidance_scale - 1)}

    def encode_images(self, images: Tensor) -> Tensor:
        return encode_shifted(self.pipeline.vae, images)

    def decode(self, x: Tensor) -> Tensor:
        return decode_shifted(self.pipeline.vae, x)
