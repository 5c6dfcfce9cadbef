"""Reward edited images that look like the image they were made from, to CLIP."""

import os

import torch
from PIL import Image
from torch import Tensor

from flow_grpo.rewards.base import Samples, Scores, reference_image, score_edits, to_uint8

CLIP = "openai/clip-vit-large-patch14"  # unless FLOW_GRPO_CLIP names a folder or another one


class ImageSimilarity:
    """Score the cosine of CLIP's embeddings of an image and of its first reference image.

    The reference is resized to the image's size first. 1 is the most; photographs hardly ever get
    below 0. Source: the reference's image_similarity. By itself it asks for no edit at all.
    """

    scope = "sample"
    runs = "thread"
    needs_reference = True

    def __init__(self, device: str = "cpu"):
        self.device = device
        self._model, self._processor = load_clip(os.environ.get("FLOW_GRPO_CLIP") or CLIP, device)

    def __call__(self, samples: Samples) -> Scores:
        known: dict[tuple, Tensor] = {}  # a group's members share their reference

        def score(image: Tensor, references, _prompt: str, _metadata: dict) -> tuple[float, dict]:
            made, key = self.embedding(to_uint8(image)), (id(references[0]), *image.shape)
            if key not in known:
                known[key] = self.embedding(reference_image(references[0], image))
            return float(made @ known[key]), {}

        return score_edits(samples, score)

    @torch.no_grad()
    def embedding(self, pixels) -> Tensor:
        """Return the unit vector (d,) float32 of an image (h, w, 3) uint8."""
        inputs = self._processor(images=Image.fromarray(pixels), return_tensors="pt")
        output = self._model.get_image_features(inputs["pixel_values"].to(self.device))
        (features,) = output.pooler_output
        return features / features.norm()


def load_clip(name: str, device: str):
    """Return (CLIPModel without its text half, image processor) in float32 on `device`.

    Raises:
        ValueError: `name` is no folder or id of a CLIP that can be loaded.
    """
    from safetensors import SafetensorError
    from transformers import CLIPImageProcessorPil, CLIPModel

    try:
        model, found = CLIPModel.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
        lacking = [key for key in found["missing_keys"] if key.startswith("vis")]
        if lacking:  # they would be random
            raise ValueError(f"it holds no {min(lacking)}")
        processor = CLIPImageProcessorPil.from_pretrained(name)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"image_similarity cannot load a CLIP from {name}: {reason}; "
            "name its folder in the environment, FLOW_GRPO_CLIP=..."
        ) from error
    model.text_model = model.text_projection = None
    return model.requires_grad_(False).eval().to(device), processor
