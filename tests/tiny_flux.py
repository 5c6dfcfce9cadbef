"""Build tiny random FLUX.1 pipelines from configs, through the real diffusers classes."""

import json
from pathlib import Path

import numpy as np
import tiny_models
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, T5Tokenizer


def t5() -> tuple[T5Tokenizer, T5EncoderModel]:
    """Return a tokenizer that spells ASCII and a 2-layer encoder of width 32."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return tokenizer, T5EncoderModel(T5Config(vocab_size=len(tokenizer), **sizes))


def clip_text_encoder(tokenizer) -> CLIPTextModel:
    """Return a 2-layer text encoder of width 16, without a projection."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tiny_models.MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def vae() -> AutoencoderKL:
    """Return an autoencoder of 4 latent channels, a quarter of the pixels' height and width."""
    return AutoencoderKL(
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
        shift_factor=0.06,
        scaling_factor=1.5,
    )


def flux(cls=FluxPipeline, *, guidance_embeds: bool = True, seed: int = 0):
    """Return a random FLUX.1: 32 x 32 pixels, 8 x 8 x 4 latents, 16 image tokens."""
    torch.manual_seed(seed)
    tokenizer = tiny_models.clip_tokenizer()
    t5_tokenizer, t5_encoder = t5()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    return cls(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=clip_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


def flux_kontext(*, seed: int = 0) -> FluxKontextPipeline:
    """Return a random FLUX.1-Kontext of the same sizes."""
    return flux(FluxKontextPipeline, seed=seed)


def image(seed: int, width: int = 32, height: int = 32) -> Image.Image:
    """Return a picture of 16 coloured squares."""
    colors = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((width, height), Image.Resampling.NEAREST)


def write_edit_set(folder: Path) -> None:
    """Write {train,test}_metadata.jsonl, 6 prompts each over 3 images of different shapes."""
    for split, first in (("train", 0), ("test", 10)):
        (folder / split).mkdir()
        lines = []
        for place, size in enumerate(((32, 32), (48, 32), (20, 40))):
            name = f"{split}/{place}.png"
            image(first + place, *size).save(folder / name)
            lines += [{"prompt": f"make it {c}", "image": name} for c in ("red", "blue")]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{split}_metadata.jsonl").write_text(text)


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are FLUX.1's own."""
    return {"latents": x.flatten(1, 2), "guidance_scale": guidance_scale}


def own_edit_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return those of FLUX.1-Kontext; `images` are as large as the image to make."""
    arguments = own_arguments(pipeline, x, images, size, guidance_scale)
    area = {"max_area": size[0] * size[1], "_auto_resize": False}
    return {"image": [image for (image,) in images], **area, **arguments}
