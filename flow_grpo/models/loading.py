"""Find a pipeline on disk or on the hub and check its family before anything large is read."""

import json
from pathlib import Path

import torch

from flow_grpo import registry

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
MODELS = "flow_grpo.models"
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
    index = _read_index(path, revision)
    found = _class_name(index)
    if found != expected:
        family = _families().get(found)
        script = f"scripts/train_{family}.py" if family else "the train script of its family"
        raise ValueError(
            f"{path} holds a {found}, not a {expected}; use {script}, or another pretrained.model"
        )
    return index


def adapter_name(model: str, revision: str) -> str:
    """Return the file of `flow_grpo/models` whose adapter the pipeline `model` belongs to.

    Raises:
        ValueError: its model_index.json cannot be had or is broken, or there is no such adapter.
    """
    path = resolve_model(model)
    found = _class_name(_read_index(path, revision))
    families = _families()
    if found not in families:
        raise ValueError(
            f"{path} holds a {found}, which no file of flow_grpo/models is for; there are: "
            f"{', '.join(f'{name} ({kind})' for kind, name in families.items())}"
        )
    return families[found]


def _families() -> dict[str, str]:
    """Return {pipeline class: file of `flow_grpo/models`}."""
    return {registry.load(MODELS, name).pipeline_class: name for name in registry.names(MODELS)}


def _read_index(path: str, revision: str) -> dict:
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
    return index if isinstance(index, dict) else {}


def _class_name(index: dict) -> str:
    return index.get("_class_name") or "file without _class_name"


def quiet_libraries() -> None:
    """Keep load-time progress bars and notices of the libraries off the screen."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
