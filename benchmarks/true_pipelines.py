"""Build pipelines in the published models' configuration, with random weights, in memory.

What costs time and memory is true: the transformer, the text encoders and the autoencoder have
the published sizes, in the dtypes that an adapter's `load` gives them. Tokenizers and schedulers
are those of the tests' tiny pipelines; prompts are padded to the same lengths either way.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from families import FAMILIES

CLIP_TOKENS = 77


def pipeline(family: str, parts: Mapping, dtype: torch.dtype, device: torch.device | str):
    """Return a pipeline with random weights on `device`.

    Args:
        family: its adapter's file.
        parts: {name: function that makes it}, as `PARTS` has them.
        dtype: of all but the autoencoder, which is float32.
        device: where the weights are drawn.
    """
    tiny = FAMILIES[family].pipeline()
    small = {k: part for k, part in tiny.components.items() if not isinstance(part, nn.Module)}
    modules = {
        name: module(make, torch.float32 if name == "vae" else dtype, device)
        for name, make in parts.items()
    }
    for name, part in small.items():
        if "CLIP" in type(part).__name__:  # how many tokens a pipeline makes of a prompt
            config = modules[name.replace("tokenizer", "text_encoder")].config
            part.model_max_length = config.max_position_embeddings
    return type(tiny)(**{**small, **modules})


def tiny_parts(family: str) -> dict[str, Callable[[], nn.Module]]:
    """Return what makes the parts of the tests' tiny pipeline anew, to try things out."""
    found = {}
    for name, part in FAMILIES[family].pipeline().components.items():
        if isinstance(part, nn.Module):
            made_by = getattr(type(part), "from_config", type(part))  # diffusers', transformers'
            found[name] = partial(made_by, part.config)
    return found


def module(make: Callable[[], nn.Module], dtype: torch.dtype, device) -> nn.Module:
    """Return `make()` on `device`, in the dtypes that `from_pretrained(dtype=dtype)` gives."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = make().eval()
    finally:
        torch.set_default_dtype(before)
    return as_loaded(made, dtype)


def as_loaded(made: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give the weights the dtypes that `from_pretrained` does: some models keep parts in float32.

    transformers heeds that in fp16 only.
    """
    kept = set(getattr(made, "_keep_in_fp32_modules", None) or ())
    if type(made).__module__.startswith("transformers") and dtype != torch.float16:
        kept = set()
    for name, tensor in made.state_dict(keep_vars=True).items():  # with what is saved of buffers
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    return made


def count(make: Callable[[], nn.Module]) -> int:
    """Return the number of parameters of `make()`, without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def clip_text(*, large: bool, projected: bool = True) -> nn.Module:
    """Return CLIP-L's text encoder, or with `large` that of OpenCLIP bigG."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    width, heads, layers, activation = (
        (1280, 20, 32, "gelu") if large else (768, 12, 12, "quick_gelu")
    )
    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=CLIP_TOKENS,
        hidden_act=activation,
        eos_token_id=2,  # as published: the end is then the largest token of a prompt
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


def t5_text() -> nn.Module:
    """Return the encoder of T5 v1.1 XXL."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=32128, tie_word_embeddings=False, **T5_XXL))


def umt5_text() -> nn.Module:
    """Return the encoder of UMT5-XXL."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(vocab_size=256384, **T5_XXL))


def qwen_text() -> nn.Module:
    """Return Qwen2.5-VL-7B, with its part that sees."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [16, 24, 24],
            "rope_theta": 1e6,
        },
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "window_size": 112,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Qwen2_5_VLForConditionalGeneration(config)


def image_vae(*, scaling_factor: float, shift_factor: float) -> nn.Module:
    """Return the autoencoder of SD3 or FLUX.1: 8 pixels a latent, 16 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
    )


def sd3_vae() -> nn.Module:
    return image_vae(scaling_factor=1.5305, shift_factor=0.0609)


def flux_vae() -> nn.Module:
    return image_vae(scaling_factor=0.3611, shift_factor=0.1159)


def qwen_vae() -> nn.Module:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage()


def wan_vae() -> nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan()


def sd3_transformer() -> nn.Module:
    """Return that of SD3.5-medium."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=24,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    )


def flux_transformer() -> nn.Module:
    """Return that of FLUX.1-dev, and of Kontext."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True)


def qwen_transformer() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel()


def wan_transformer() -> nn.Module:
    """Return that of Wan2.1-T2V-1.3B."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30)


def clip_l() -> nn.Module:
    return clip_text(large=False)


def clip_g() -> nn.Module:
    return clip_text(large=True)


def clip_l_unprojected() -> nn.Module:
    return clip_text(large=False, projected=False)


_FLUX = {
    "transformer": flux_transformer,
    "vae": flux_vae,
    "text_encoder": clip_l_unprojected,
    "text_encoder_2": t5_text,
}
PARTS = {
    "sd3": {
        "transformer": sd3_transformer,
        "vae": sd3_vae,
        "text_encoder": clip_l,
        "text_encoder_2": clip_g,
        "text_encoder_3": t5_text,
    },
    "flux": _FLUX,
    "flux_kontext": _FLUX,
    "qwenimage": {
        "transformer": qwen_transformer,
        "vae": qwen_vae,
        "text_encoder": qwen_text,
    },
    "wan2_1": {"transformer": wan_transformer, "vae": wan_vae, "text_encoder": umt5_text},
}
