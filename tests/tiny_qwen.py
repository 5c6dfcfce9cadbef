"""Build tiny random Qwen-Images from configs, through the real diffusers classes."""

import json
import re

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
SPECIALS += ("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
DIM = 32  # of the text encoder


def tokenizer(template: str = TEMPLATE) -> Qwen2Tokenizer:
    """Return a byte-level tokenizer that makes one token of every word of a pipeline's template.

    So the template takes as many tokens as the pipeline cuts off, as with the real vocabulary.
    """
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(bytes_)}, merges=[])
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = base.backend_tokenizer.pre_tokenizer
    trained.normalizer = base.backend_tokenizer.normalizer
    corpus = re.split(r"<\|[^|]*\|>|\{\}", template) * 9
    trainer = trainers.BpeTrainer(
        vocab_size=3000, min_frequency=2, initial_alphabet=bytes_, show_progress=False
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    vocab = model["vocab"] | {s: len(model["vocab"]) + i for i, s in enumerate(SPECIALS)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        model_max_length=1024,
        additional_special_tokens=list(SPECIALS[1:]),
    )


def text_encoder(tok: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Return a 2-layer Qwen2.5-VL of width 32."""
    ids = {s.strip("<|>"): tok.convert_tokens_to_ids(s) for s in SPECIALS}
    text = {
        "vocab_size": len(tok),
        "hidden_size": DIM,
        "intermediate_size": 2 * DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 1e4,
        },
        **{f"{name}_token_id": ids["endoftext"] for name in ("bos", "eos", "pad")},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": DIM,
        "fullatt_block_indexes": [0],
        "window_size": 56,
    }
    tokens = {f"{n}_token_id": ids[f"{n}_pad"] for n in ("image", "video")}
    tokens |= {f"vision_{n}_token_id": ids[f"vision_{n}"] for n in ("start", "end")}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config)


def parts(*, seed: int = 0, template: str = TEMPLATE, **transformer_config) -> dict:
    """Return the random parts: 4 pixels a latent, 8 a token, 4 latent channels."""
    torch.manual_seed(seed)
    tok = tokenizer(template)
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0],
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=DIM,
        axes_dims_rope=(4, 6, 6),
        **transformer_config,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    return {
        "scheduler": scheduler,
        "vae": vae,
        "text_encoder": text_encoder(tok),
        "tokenizer": tok,
        "transformer": transformer,
    }


def qwenimage(*, seed: int = 0) -> QwenImagePipeline:
    """Return a random Qwen-Image: 32 x 32 pixels are 4 x 4 tokens of 16 channels."""
    pipeline = QwenImagePipeline(**parts(seed=seed))
    prefix = pipeline.tokenizer(TEMPLATE.partition("{}")[0])["input_ids"]
    assert pipeline.prompt_template_encode == TEMPLATE
    assert len(prefix) == pipeline.prompt_template_encode_start_idx
    return pipeline


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are Qwen-Image's own."""
    negative = {"negative_prompt": [" "] * len(x)} if guidance_scale > 1 else {}
    return {"latents": x.flatten(1, 2), "true_cfg_scale": guidance_scale, **negative}
