"""Build tiny random Qwen-Image-Edits from configs, through the real diffusers classes.

The real processor needs torchvision for videos alone, which nobody has here: without torchvision,
`image_processor_only` lets it do without that part.
"""

from types import FunctionType

import tiny_qwen
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as stock
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_plus
from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
AREA = 64 * 64  # pixels of a reference image, where the pipelines have 1024 * 1024


def image_processor_only() -> None:
    """Let this process make a `Qwen2VLProcessor` without its part for videos."""
    if not is_torchvision_available():
        parts = classmethod(lambda cls: ["image_processor", "tokenizer"])
        Qwen2VLProcessor.get_attributes = parts


def parts(*, seed: int = 0, **transformer_config) -> dict:
    """Return those of Qwen-Image and a processor: 4 tokens of an image of 64 x 64 pixels."""
    image_processor_only()
    found = tiny_qwen.parts(seed=seed, template=TEMPLATE, **transformer_config)
    images = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112)
    videos = Qwen2VLVideoProcessor() if is_torchvision_available() else None
    found["processor"] = Qwen2VLProcessor(images, found["tokenizer"], videos)
    return found


def qwenimage_edit(*, zero_cond_t: bool = False, seed: int = 0) -> QwenImageEditPipeline:
    """Return a random Qwen-Image-Edit: 32 x 32 pixels are 4 x 4 tokens of 16 channels."""
    pipeline = QwenImageEditPipeline(**parts(seed=seed, zero_cond_t=zero_cond_t))
    assert pipeline.prompt_template_encode == TEMPLATE.replace("{}", VISION + "{}")
    return _checked(pipeline)


def qwenimage_edit_plus(*, zero_cond_t: bool = False, seed: int = 0) -> QwenImageEditPlusPipeline:
    """Return a random Qwen-Image-Edit-Plus, of the same sizes."""
    pipeline = QwenImageEditPlusPipeline(**parts(seed=seed, zero_cond_t=zero_cond_t))
    assert pipeline.prompt_template_encode == TEMPLATE
    return _checked(pipeline)


def _checked(pipeline):
    """Return the pipeline; what it cuts off must be the template up to what a user says."""
    prefix = pipeline.tokenizer(TEMPLATE.partition("{}")[0])["input_ids"]
    assert len(prefix) == pipeline.prompt_template_encode_start_idx
    with torch.no_grad():  # random attention hardly looks at a reference image
        for block in pipeline.transformer.transformer_blocks:
            for layer in (block.attn.to_v, block.attn.add_v_proj, block.attn.to_out[0]):
                layer.weight *= 3
    return pipeline


def own_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return the arguments of the unpatched pipeline's call that are Qwen-Image-Edit's own."""
    dimensions = stock.calculate_dimensions
    _let_call_see(pipeline, calculate_dimensions=lambda area, ratio: dimensions(AREA, ratio))
    ((image,),) = images
    return {"image": image, **tiny_qwen.own_arguments(pipeline, x, images, size, guidance_scale)}


def own_plus_arguments(pipeline, x, images, size, guidance_scale) -> dict:
    """Return those of Qwen-Image-Edit-Plus; the copies that the text encoder sees are of `AREA`."""
    assert stock_plus.VAE_IMAGE_SIZE == 1024 * 1024
    _let_call_see(pipeline, VAE_IMAGE_SIZE=AREA)
    width, height = stock_plus.calculate_dimensions(AREA, size[1] / size[0])
    several = [pipeline.image_processor.resize(image, height, width) for image in images[0]]
    own = tiny_qwen.own_arguments(pipeline, x, images, size, guidance_scale)
    return {"image": several, **own}


def _let_call_see(pipeline, **names) -> None:
    """Let the call of this one pipeline, whose code stays, have other globals of these names."""
    plain = type(pipeline)
    if plain.__name__.startswith("Small"):
        return
    call = plain.__call__.__wrapped__
    seen = FunctionType(
        call.__code__, {**call.__globals__, **names}, call.__name__, call.__defaults__
    )
    pipeline.__class__ = type(f"Small{plain.__name__}", (plain,), {"__call__": seen})
