"""Build the untrained parts of the pipeline: tokenizer, text encoders, VAE, transformer."""

import string

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tiny_sd3.render import SIZE
from tiny_sd3.words import TEMPLATE_WORDS
from tokenizers import AddedToken
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

NUM_TEXT_TOKENS = 16  # start, end, two quotes, four letters, "on a red sign": 12 at most
TEXT_WIDTH = 64  # of each of the two encoders; the joint and the pooled width are twice that
LATENT_CHANNELS = 8
VAE_FACTOR = 4


def tokenizer() -> CLIPTokenizer:
    """Return a tokenizer that spells words letter by letter, template words excepted.

    The template words are added tokens, matched in lower case before CLIP lowers the text: `on` is
    one token and `ON` is two letters, so no word in capitals is ever merged.
    """
    characters = [c for c in map(chr, range(33, 127)) if c not in string.ascii_uppercase]
    specials = ["<|startoftext|>", "<|endoftext|>", "<|unknown|>"]
    tokens = characters + [f"{character}</w>" for character in characters] + specials
    made = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token="<|unknown|>",
        model_max_length=NUM_TEXT_TOKENS,
    )
    made.add_tokens(
        [AddedToken(word, single_word=True, normalized=False) for word in TEMPLATE_WORDS]
    )
    return made


def text_encoder(tokens: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Return a 2-layer CLIP text encoder; its pooling looks for the tokenizer's own eos."""
    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=NUM_TEXT_TOKENS,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    assert config.eos_token_id != 2, "2 selects transformers' legacy pooling"
    return CLIPTextModelWithProjection(config)


def vae(channels: tuple[int, int, int]) -> AutoencoderKL:
    """Return a VAE of factor 4; its shift and scale are set after training.

    Two groups a norm: with two channels a group, plain colours would be normalised away. It starts
    with little posterior noise, without which the first hundreds of steps learn nothing.
    """
    made = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=2,
        sample_size=SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    torch.nn.init.constant_(made.encoder.conv_out.bias[LATENT_CHANNELS:], -5.0)  # log variance
    return made


def transformer(hidden: int, layers: int, heads: int) -> SD3Transformer2DModel:
    """Return an MMDiT of patch size 2: 64 image tokens."""
    if hidden % heads:
        raise ValueError(f"--hidden {hidden} must be a multiple of --heads {heads}")
    side = SIZE // VAE_FACTOR
    return SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=layers,
        attention_head_dim=hidden // heads,
        num_attention_heads=heads,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=hidden,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=side // 2,
        qk_norm="rms_norm",
    )


def pipeline(image_coder: AutoencoderKL, *, hidden: int, layers: int, heads: int, shift: float):
    """Assemble a StableDiffusion3Pipeline without T5 around a VAE, the rest untrained."""
    tokens, tokens_2 = tokenizer(), tokenizer()
    made = StableDiffusion3Pipeline(
        transformer=transformer(hidden, layers, heads),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=image_coder,
        text_encoder=text_encoder(tokens),
        tokenizer=tokens,
        text_encoder_2=text_encoder(tokens_2),
        tokenizer_2=tokens_2,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    made.set_progress_bar_config(disable=True)
    return made


def load(folder):
    """Load a saved folder as its user does."""
    made = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    made.set_progress_bar_config(disable=True)
    return made
