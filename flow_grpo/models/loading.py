"""Find a pipeline on disk or on the hub and check its family before anything large is read."""

import json
from pathlib import Path

import torch

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def half_precision_dtype(mixed_precision: str) -> torch.dtype:
    """Return the dtype of frozen weights under `mixed_precision` (no, fp16, bf16)."""
    if mixed_precision not in DTYPES:
        raise ValueError(
            f"mixed_precision ({mixed_precision!r}) must be one of {', '.join(DTYPES)}"
        )
    return DTYPES[mixed_precision]


def resolve_model(name: str) -> str:
    """Return a folder's path or a hub id.

    A relative folder is looked up in the working directory, then beside the package.

    Raises:
        ValueError: no such folder, and no hub id either.
    """
    for candidate in (Path(name), PACKAGE_PARENT / name):
        if candidate.is_dir():
            return str(candidate)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and " " not in name:
        return name
    raise ValueError(
        f"pretrained.model ({name!r}) is no folder here, and no hub id (owner/name); "
        "give the folder that holds model_index.json"
    )


def model_index(path: str, revision: str, *, expected: str) -> dict:
    """Return the pipeline's model_index.json after checking its class.

    Raises:
        ValueError: it cannot be had, is broken, or belongs to another pipeline class.
    """
    file = Path(path) / "model_index.json"
    if not Path(path).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(path, "model_index.json", revision=revision))
        except Exception as error:  # the hub raises a dozen kinds: offline, gated, missing, ...
            raise ValueError(
                f"cannot get pretrained.model ({path!r}) from the hub ({type(error).__name__}); "
                "download it first (hf download) or give a local folder"
            ) from error
    if not file.is_file():
        raise ValueError(f"{path} holds no model_index.json: it is no diffusers pipeline folder")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON: {error}") from error
    found = index.get("_class_name") if isinstance(index, dict) else None
    if found != expected:
        raise ValueError(
            f"{path} holds a {found or 'file without _class_name'}, not a {expected}; "
            "use the train script of that family, or another pretrained.model"
        )
    return index


def quiet_libraries() -> None:
    """Keep load-time progress bars and notices of the libraries off the screen."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
