"""What a task wants: prompts and rewards. One function per task."""

from ml_collections import ConfigDict


def ocr(config: ConfigDict) -> None:
    """Render the quoted text of a prompt; scored by an OCR engine."""
    config.dataset = "dataset/ocr"
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"ocr": 1.0}


def video_ocr(config: ConfigDict) -> None:
    """Render the quoted text of a prompt in a clip; frames are scored by an OCR engine."""
    ocr(config)
    config.reward_fn = {"video_ocr": 1.0}


def tiny_ocr(config: ConfigDict) -> None:
    """Write a word of 2-4 letters on a coloured sign; scored by an OCR engine."""
    config.dataset = "dataset/tiny_ocr"
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"ocr": 1.0}


def jpeg(config: ConfigDict) -> None:
    """Make images that JPEG compresses well: a reward that needs no model."""
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"jpeg_compressibility": 1.0}


def geneval(config: ConfigDict) -> None:
    """Show the objects of a prompt in their number, colours and places; scored by a detector."""
    config.dataset = "dataset/geneval"
    config.prompt_fn = "geneval"
    config.reward_fn = {"geneval": 1.0}
    config.eval.batch_size = 14


def counting_edit(config: ConfigDict) -> None:
    """Change the number of objects in an image; scored by a detector and by likeness to it."""
    config.dataset = "dataset/counting_edit"
    config.prompt_fn = "geneval"
    config.reward_fn = {"image_similarity": 0.5, "geneval": 0.5}


def pickscore(config: ConfigDict) -> None:
    """Make images that people prefer; scored by a model of their choices."""
    config.dataset = "dataset/pickscore"
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"pickscore": 1.0}


def clipscore(config: ConfigDict) -> None:
    """Show what a prompt says; scored by the similarity of CLIP's embeddings."""
    config.dataset = "dataset/pickscore"
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"clipscore": 1.0}
