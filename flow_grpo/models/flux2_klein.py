"""Adapt FLUX.2 klein (`Flux2KleinPipeline`): text to image, without reference images."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from flow_grpo.models.base import FlowModel
from flow_grpo.models.flux import ATTENTION, position_ids
from flow_grpo.models.schedulers import scheduler_sigmas
from flow_grpo.models.tokens import PATCH, pack, unpack

MAX_SINGLE_BLOCKS = 48  # FLUX.2-dev's; klein has 20 (4B) or 24 (9B)


@final
class Flux2Klein(FlowModel):
    """Patched latents (128, h/16, w/16), time 0..1, guidance in one batch unless distilled."""

    pipeline_class = "Flux2KleinPipeline"
    family = "flux2-klein"
    block_class = "Flux2TransformerBlock,Flux2SingleTransformerBlock"
    no_fp16 = (
        "FLUX.2 was published in bf16, and diffusers clips its activations at fp16's largest "
        "number (65504)"
    )
    lora_targets = (
        *ATTENTION,
        "ff.linear_in",
        "ff.linear_out",
        "ff_context.linear_in",
        "ff_context.linear_out",
        "attn.to_qkv_mlp_proj",
        # By its number: "attn.to_out" would also name the double blocks' list of modules.
        *(f"single_transformer_blocks.{i}.attn.to_out" for i in range(MAX_SINGLE_BLOCKS)),
    )

    @classmethod
    def inspect(cls, path: str, index: dict, config) -> dict:
        """Refuse guidance for a distilled model, whose pipeline ignores it."""
        for section in ("sample", "eval"):
            scale = config[section].guidance_scale
            if index.get("is_distilled", False) and scale != 1:
                raise ValueError(
                    f"{section}.guidance_scale ({scale}) must be 1 for {path}, which is distilled "
                    "(is_distilled): its pipeline ignores the scale; the base models take one"
                )
        return {}

    @property
    def size_unit(self) -> int:
        return PATCH * self.pipeline.vae_scale_factor

    def encode_text(self, text: str, images: Sequence, size: tuple[int, int]) -> dict[str, Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            text,
            device=self.pipeline.text_encoder.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds}

    def latent_shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return (self.transformer.config.in_channels, *(n // self.size_unit for n in size))

    def sigmas(self, num_steps: int, size: tuple[int, int]) -> Tensor:
        mu = self._shift(num_steps, size)
        return scheduler_sigmas(self.pipeline.scheduler, num_steps, mu=mu, linear=True)

    def noise_levels(self, num_levels: int, num_steps: int, size: tuple[int, int]) -> Tensor:
        """As the base's, at the shift of `num_steps`: that of 1000 steps would leave no noise."""
        mu = self._shift(num_steps, size)
        return scheduler_sigmas(self.pipeline.scheduler, num_levels, mu=mu, linear=True)[:-1]

    def _shift(self, num_steps: int, size: tuple[int, int]) -> float:
        """Return the pipeline's shift, a line through those of 10 and of 200 steps."""
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        _, height, width = self.latent_shape(size)
        return compute_empirical_mu(image_seq_len=height * width, num_steps=num_steps)

    def forward(
        self,
        module: nn.Module,
        x: Tensor,
        sigma: Tensor,
        cond: dict[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        """Run the transformer; it rounds sigma to its own dtype, once.

        Positions have four numbers: image, row, column, and place in the text.
        """
        embeds = cond["prompt_embeds"].to(self.dtype)
        places = torch.arange(embeds.shape[1], device=x.device)
        tokens = module(
            hidden_states=x.flatten(2).transpose(1, 2).to(self.dtype),
            timestep=sigma * 1000 / 1000,  # as the pipeline's, whose float32 has this rounding
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=nn.functional.pad(places[:, None], (3, 0)),
            img_ids=nn.functional.pad(position_ids(x.movedim(1, -1)), (0, 1)),
            return_dict=False,
        )[0].float()
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])

    def own_latents(self, latents: Tensor) -> Tensor:
        return patched(self.pipeline.vae, latents)

    def encode_images(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return patched(vae, vae.encode((images * 2 - 1).to(vae.dtype)).latent_dist.mode()).float()

    def decode(self, x: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = statistics(vae)
        latents = unpack((x.to(vae.dtype) * std + mean).movedim(1, -1))
        return (vae.decode(latents, return_dict=False)[0].float() / 2 + 0.5).clamp(0, 1)


def patched(vae: nn.Module, latents: Tensor) -> Tensor:
    """Return x_0 (b, 4c, h/2, w/2) of the autoencoder's latents (b, c, h, w)."""
    mean, std = statistics(vae)
    return (pack(latents).movedim(-1, 1) - mean) / std


def statistics(vae: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation (1, 4c, 1, 1) of the patched latents.

    They are the running statistics of a batch norm inside the autoencoder.
    """
    norm = vae.bn
    std = (norm.running_var + vae.config.batch_norm_eps).sqrt()
    return norm.running_mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)
