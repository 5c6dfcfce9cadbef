"""Build tiny random pipelines from configs, through the real diffusers classes."""

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

MAX_TOKENS = 32


def clip_tokenizer() -> CLIPTokenizer:
    """Spell printable ASCII letter by letter."""
    characters = [chr(code) for code in range(33, 127)]
    specials = ["<|startoftext|>", "<|endoftext|>"]
    tokens = characters + [f"{c}</w>" for c in characters] + specials
    vocab = {token: place for place, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=MAX_TOKENS)


def clip_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Return a 2-layer text encoder of width 16."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def clip(*, seed: int = 0) -> tuple[CLIPModel, CLIPImageProcessorPil]:
    """Return a random CLIP of 32 x 32 pixels and 24 dimensions, and its image processor."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 2
    config = CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": 99,
            "max_position_embeddings": 16,
            "bos_token_id": 97,
            "eos_token_id": 98,
        },
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    return CLIPModel(config), processor


def sd3(*, with_t5: bool = False, seed: int = 0) -> StableDiffusion3Pipeline:
    """Return a random SD3: 32 x 32 pixels, 8 x 8 x 4 latents, 16 image tokens."""
    torch.manual_seed(seed)
    first, second = clip_tokenizer(), clip_tokenizer()
    t5_tokenizer = t5 = None
    if with_t5:
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
        pieces += [(chr(code), -3.0) for code in range(33, 127)]
        t5_tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        t5 = T5EncoderModel(T5Config(vocab_size=len(t5_tokenizer), **sizes))
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    vae = AutoencoderKL(
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
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clip_text_encoder(first),
        tokenizer=first,
        text_encoder_2=clip_text_encoder(second),
        tokenizer_2=second,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    )


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are SD3's own."""
    return {"latents": x, "guidance_scale": guidance_scale}
