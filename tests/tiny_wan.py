"""Build a tiny random Wan 2.1 from configs, through the real diffusers classes."""

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

FLOW_SHIFT = 3.0
LATENTS_MEAN = [0.1, -0.2, 0.3, 0.0]
LATENTS_STD = [1.5, 0.5, 2.0, 1.0]


def scheduler() -> UniPCMultistepScheduler:
    """Return what the published pipelines come with."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
    )


def wan(*, seed: int = 0) -> WanPipeline:
    """Return a random Wan: 5 frames of 32 x 32 pixels are 2 frames of 4 x 4 tokens."""
    torch.manual_seed(seed)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=LATENTS_MEAN,
        latents_std=LATENTS_STD,
        scale_factor_spatial=4,
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **sizes)),
        vae=vae,
        scheduler=scheduler(),
        transformer=transformer,
    )


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are Wan's own.

    The pipeline is given the scheduler that the adapter's steps are those of.
    """
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=FLOW_SHIFT)
    num_frames = (x.shape[2] - 1) * pipeline.vae_scale_factor_temporal + 1
    return {"latents": x, "num_frames": num_frames, "guidance_scale": guidance_scale}
