"""What a task wants: prompts and rewards. One function per task."""

from ml_collections import ConfigDict


def ocr(config: ConfigDict) -> None:
    """Render the quoted text of a prompt; scored by an OCR engine."""
    config.dataset = "dataset/ocr"
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"ocr": 1.0}


def tiny_ocr(config: ConfigDict) -> None:
    """Write a word of 2-4 letters on a coloured sign; scored by an OCR engine."""
    config.dataset = "dataset/tiny_ocr"
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"ocr": 1.0}


def jpeg(config: ConfigDict) -> None:
    """Make images that JPEG compresses well: a reward that needs no model."""
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"jpeg_compressibility": 1.0}
