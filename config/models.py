"""What a model wants: path, resolution, precision, adapter. One function per model."""

from ml_collections import ConfigDict


def sd3(config: ConfigDict) -> None:
    """Set up SD3.5-medium at 512 px: 10 steps in training, 40 in evaluation, LoRA r=32."""
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.mixed_precision = "fp16"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.guidance_scale = 4.5
    config.eval.num_steps = 40
    config.eval.guidance_scale = 4.5
    config.train.lora_rank = 32
    config.train.lora_alpha = 64


def published_clean_images(config: ConfigDict) -> None:
    """Set the shape in which DPO and SFT were published for SD3.5: 40 steps, an update an epoch.

    24 images of one prompt a rank; 32 GPUs are assumed, hence 32 groups.
    """
    config.sample.num_steps = 40
    config.sample.groups_per_epoch = 32
    config.sample.group_size = 24
    config.sample.batch_size = 24
    config.train.updates_per_epoch = 1


def flux(config: ConfigDict) -> None:
    """Set up FLUX.1-dev at 512 px: 6 steps in training, 28 in evaluation, LoRA r=64, bf16."""
    config.pretrained.model = "black-forest-labs/FLUX.1-dev"
    config.mixed_precision = "bf16"
    config.resolution = 512
    config.sample.num_steps = 6
    config.sample.guidance_scale = 3.5  # an embedding: no second forward
    config.sample.batch_size = 3
    config.sample.noise_level = 0.9
    config.eval.num_steps = 28
    config.eval.guidance_scale = 3.5
    config.train.lora_rank = 64
    config.train.lora_alpha = 128


def flux_kontext(config: ConfigDict) -> None:
    """Set up FLUX.1-Kontext-dev, which edits an image: as `flux`, with less guidance."""
    flux(config)
    config.pretrained.model = "black-forest-labs/FLUX.1-Kontext-dev"
    config.sample.guidance_scale = 2.5
    config.sample.batch_size = 2  # published: 3, which takes 78 GiB
    config.eval.guidance_scale = 2.5


def qwenimage(config: ConfigDict) -> None:
    """Set up Qwen-Image at 512 px: 10 steps in training, 50 in evaluation, LoRA r=64, bf16."""
    config.pretrained.model = "Qwen/Qwen-Image"
    config.mixed_precision = "bf16"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.guidance_scale = 4.0
    config.sample.max_sequence_length = (
        256  # fixed, so paid for in every forward; stock cuts at 512
    )
    config.eval.num_steps = 50
    config.eval.guidance_scale = 4.0
    config.train.lora_rank = 64
    config.train.lora_alpha = 128
    config.train.gradient_checkpointing = True


def qwenimage_edit(config: ConfigDict) -> None:
    """Set up Qwen-Image-Edit, which edits an image: as `qwenimage`.

    Each image has 4096 tokens, at the published resolution, beside the 1024 of the one to make. A
    prompt with its negative and its image takes 24 MB of host memory (bf16), so few are kept.
    """
    qwenimage(config)
    config.pretrained.model = "Qwen/Qwen-Image-Edit"
    config.sample.prompt_cache_size = 128


def qwenimage_edit_plus(config: ConfigDict) -> None:
    """Set up Qwen-Image-Edit-2509, which sees up to three images, of 512 * 512 pixels each."""
    qwenimage_edit(config)
    config.pretrained.model = "Qwen/Qwen-Image-Edit-2509"
    config.reference_resolution = 512


def wan2_1(config: ConfigDict) -> None:
    """Set up Wan2.1-T2V-1.3B, clips of 33 frames at 240 x 416: 20 steps, 50 in evaluation, bf16."""
    config.pretrained.model = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    config.mixed_precision = "bf16"
    config.resolution = 240
    config.width = 416
    config.num_frames = 33
    config.sample.num_steps = 20
    config.sample.guidance_scale = 4.5
    config.sample.max_sequence_length = 512  # the model saw padding to 512 in training, unmasked
    config.eval.num_steps = 50
    config.eval.guidance_scale = 4.5
    config.train.lora_rank = 32
    config.train.lora_alpha = 64
    config.train.gradient_checkpointing = True


def zimage(config: ConfigDict) -> None:
    """Set up Z-Image at 512 px: 10 steps in training, 50 in evaluation, LoRA r=64, bf16.

    Not published for online learning and never trained here; sizes as for Qwen-Image.
    """
    config.pretrained.model = "Tongyi-MAI/Z-Image"
    config.mixed_precision = "bf16"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.guidance_scale = 5.0  # the pipeline's own number for it is 4
    config.sample.max_sequence_length = 256  # every forward is that long; stock cuts at 512
    config.eval.num_steps = 50
    config.eval.guidance_scale = 5.0
    config.train.lora_rank = 64
    config.train.lora_alpha = 128
    config.train.gradient_checkpointing = True


def flux2_klein(config: ConfigDict) -> None:
    """Set up FLUX.2 klein base 4B at 512 px: 10 steps, 50 in evaluation, LoRA r=64, bf16.

    Not published for online learning and never trained here; sizes as for Qwen-Image.
    """
    config.pretrained.model = "black-forest-labs/FLUX.2-klein-base-4B"
    config.mixed_precision = "bf16"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.guidance_scale = 4.0  # 1 for the distilled models
    config.sample.max_sequence_length = 512  # the transformer sees the padding, unmasked
    config.eval.num_steps = 50
    config.eval.guidance_scale = 4.0
    config.train.lora_rank = 64
    config.train.lora_alpha = 128
    config.train.gradient_checkpointing = True


def tiny_sd3(config: ConfigDict) -> None:
    """Set up the shipped small SD3 at 64 px: no T5, no guidance, fp32 on any device."""
    config.pretrained.model = "flow_grpo/assets/tiny_sd3"
    config.pretrained.use_t5 = False
    config.mixed_precision = "no"
    config.resolution = 64
    config.sample.num_steps = 8
    config.sample.guidance_scale = 1.0
    config.sample.max_sequence_length = 0
    config.eval.num_steps = 8
    config.eval.guidance_scale = 1.0
    config.train.lora_rank = 16
    config.train.lora_alpha = 32
