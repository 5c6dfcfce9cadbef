"""Build a tiny random Z-Image from configs, through the real diffusers classes."""

import tiny_flux
import tiny_qwen
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

DIM = 32  # of the text encoder
# Enough of Qwen3's: one message of a user, thinking allowed or cut short.
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level tokenizer with a chat template."""
    tok = tiny_qwen.tokenizer()
    tok.chat_template = CHAT
    return tok


def text_settings(tok: Qwen2Tokenizer, num_layers: int, dim: int) -> Qwen3Config:
    """Return the configuration of a small Qwen3."""
    return Qwen3Config(
        vocab_size=len(tok),
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,  # a prompt must matter to random weights
    )


def zimage(*, seed: int = 0) -> ZImagePipeline:
    """Return a random Z-Image: 32 x 32 pixels are 4 x 8 x 8 latents, 16 tokens."""
    torch.manual_seed(seed)
    tok = tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=DIM,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    with torch.no_grad():  # zero at first: a pad token that is not there would not show
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny_flux.vae(),
        text_encoder=Qwen3Model(text_settings(tok, 3, DIM)),
        tokenizer=tok,
        transformer=transformer,
    )


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are Z-Image's own."""
    return {"latents": x, "guidance_scale": guidance_scale - 1}  # p + s (p - n) is its formula
