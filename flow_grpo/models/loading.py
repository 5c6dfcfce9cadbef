"""Find a pipeline on disk or on the hub and check its family before anything large is read."""

import json
from pathlib import Path

import torch

from flow_grpo import registry

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def half_precision_dtype(mixed_precision: str, *, no_fp16: str = "") -> torch.dtype:
    """Return the dtype of frozen weights under `mixed_precision` (no, fp16, bf16).

    `no_fp16` says why a family cannot run in fp16, if it cannot.
    """
    allowed = [name for name in DTYPES if not (no_fp16 and name == "fp16")]
    if mixed_precision not in allowed:
        reason = f": {no_fp16}" if mixed_precision == "fp16" else ""
        raise ValueError(
            f"mixed_precision ({mixed_precision!r}) must be one of {', '.join(allowed)}{reason}"
        )
    return DTYPES[mixed_precision]


def load_pipeline(family: type, config):
    """Load `family.pipeline_class`: frozen parts in half if asked, what is trained and VAE in fp32.

    Raises:
        ValueError: another family's pipeline, a broken one, or a variant it cannot do.
    """
    import diffusers

    half = half_precision_dtype(config.mixed_precision, no_fp16=family.no_fp16)
    path, revision = resolve_model(config.pretrained.model), config.pretrained.revision
    index = model_index(path, revision, expected=family.pipeline_class)
    own = family.inspect(path, index, config)
    dtypes = {
        "default": half,
        "transformer": half if config.use_lora else torch.float32,
        "vae": torch.float32,
    }
    try:
        return getattr(diffusers, family.pipeline_class).from_pretrained(
            path, revision=revision, dtype=dtypes, use_safetensors=True, **own
        )
    except OSError as error:
        raise ValueError(f"cannot load {path}, a file is missing or broken: {error}") from error


def transformer_config(path: str, index: dict, config) -> dict:
    """Return the config.json of a pipeline's transformer.

    Raises:
        ValueError: it cannot be had.
    """
    import diffusers

    transformer = getattr(diffusers, index["transformer"][1])
    revision = config.pretrained.revision
    try:
        return transformer.load_config(path, subfolder="transformer", revision=revision)
    except OSError as error:
        raise ValueError(f"cannot load {path}, a file is missing or broken: {error}") from error


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
            f"use {_script(found)}, or another pretrained.model"
        )
    return index


def _script(pipeline_class: str | None) -> str:
    """Return the train script for a pipeline class."""
    for name in registry.names("flow_grpo.models"):
        if registry.load("flow_grpo.models", name).pipeline_class == pipeline_class:
            return f"scripts/train_{name}.py"
    return "the train script of its family, if there is one"


def quiet_libraries() -> None:
    """Keep load-time progress bars and notices of the libraries off the screen."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
