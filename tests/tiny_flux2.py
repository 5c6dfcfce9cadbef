"""Build a tiny random FLUX.2 klein from configs, through the real diffusers classes."""

import tiny_zimage
import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

DIM = 16  # of the text encoder
NUM_LAYERS = 28  # of it: the pipeline takes the 9th, 18th and 27th


def vae() -> AutoencoderKLFlux2:
    """Return an autoencoder of 4 latent channels with statistics that are not 0 and 1."""
    found = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    found.bn.running_mean.normal_()
    found.bn.running_var.uniform_(0.5, 2.0)
    return found


def flux2_klein(*, is_distilled: bool = False, seed: int = 0) -> Flux2KleinPipeline:
    """Return a random FLUX.2 klein: 32 x 32 pixels are 16 x 4 x 4 latents, 16 tokens."""
    torch.manual_seed(seed)
    tok = tiny_zimage.tokenizer()
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * DIM,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    with torch.no_grad():  # else a prompt hardly shows beside the image
        transformer.context_embedder.weight.mul_(3)
        for block in transformer.single_transformer_blocks:
            block.attn.to_out.weight.mul_(3)
        transformer.single_stream_modulation.linear.weight.mul_(3)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae(),
        text_encoder=Qwen3ForCausalLM(tiny_zimage.text_settings(tok, NUM_LAYERS, DIM)),
        tokenizer=tok,
        transformer=transformer,
        is_distilled=is_distilled,
    )


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are FLUX.2 klein's own."""
    return {"latents": x, "guidance_scale": guidance_scale}


def returned(pipeline, latents):
    """Undo what the pipeline's call does to its latents before it returns them."""
    norm = pipeline.vae.bn
    std = torch.sqrt(norm.running_var + pipeline.vae.config.batch_norm_eps)
    patched = pipeline._patchify_latents(latents)
    return (patched - norm.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
