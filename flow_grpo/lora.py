"""Add, load and export LoRA adapters in the formats that users have.

Exports have alpha folded into B, so diffusers and ComfyUI apply the same strength without reading
metadata. Imports take a diffusers file or folder (alpha from its header) or a PEFT folder (alpha
from adapter_config.json).
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

ADAPTER = "default"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
WEIGHTS = ("lora_A.weight", "lora_B.weight")


def add(transformer: nn.Module, *, targets: tuple[str, ...], rank: int, alpha: float) -> None:
    """Add a LoRA of float32 weights, Gaussian A and zero B, to a diffusers transformer."""
    from peft import LoraConfig

    if rank < 1:
        raise ValueError(f"train.lora_rank ({rank}) must be at least 1")
    transformer.requires_grad_(False)
    transformer.add_adapter(
        LoraConfig(
            r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=list(targets)
        ),
        adapter_name=ADAPTER,
    )
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def state(transformer: nn.Module) -> dict[str, Tensor]:
    """Return {module.lora_A.weight: parameter} of the adapter, without its name or a prefix."""
    return {
        name.replace(f".{ADAPTER}.weight", ".weight"): parameter
        for name, parameter in transformer.named_parameters()
        if ".lora_" in name
    }


def load(transformer: nn.Module, path: str) -> int:
    """Copy an adapter's weights into the one that `add` made; return how many matched.

    Raises:
        ValueError: no adapter there, another rank, or keys that do not match.
    """
    loaded, scale = read(path)
    own = dict(state(transformer))
    config = transformer.peft_config[ADAPTER]
    matched = [key for key in loaded if key in own]
    if not matched:
        raise ValueError(
            f"{path}: none of its {len(loaded)} tensors belongs to this adapter (first: "
            f"{next(iter(loaded), 'none')}; expected such as {next(iter(own))})"
        )
    if len(matched) != len(own) or len(matched) != len(loaded):
        raise ValueError(
            f"{path}: {len(matched)} of its {len(loaded)} tensors match the {len(own)} of this "
            "adapter; it was made for other target modules"
        )
    for key in matched:
        tensor = loaded[key].float()
        if tensor.shape != own[key].shape:
            rank = min(tensor.shape)
            raise ValueError(
                f"{path}: {key} has shape {tuple(tensor.shape)}, expected {tuple(own[key].shape)}; "
                f"set train.lora_rank to the file's rank ({rank})"
            )
        if key.endswith("lora_B.weight"):
            tensor = tensor * (scale(key) / (config.lora_alpha / config.r))
        own[key].data.copy_(tensor)
    return len(matched)


def read(path: str):
    """Return ({module.lora_A.weight: tensor}, scale) of a diffusers or PEFT adapter.

    `scale(key)` is the strength, alpha / rank, of the module that `key` belongs to; 1 in a
    diffusers file without metadata, as diffusers itself has it.

    Raises:
        ValueError: no adapter there, or a broken one.
    """
    file = _adapter_file(Path(path))
    try:
        with safe_open(file, framework="pt") as handle:
            keys = handle.keys()
            raw = {key: handle.get_tensor(key) for key in keys}
            header = handle.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} is no valid safetensors file: {error}") from error
    tensors = {}
    for key, tensor in raw.items():
        for prefix in ("base_model.model.", "transformer."):
            key = key.removeprefix(prefix)
        tensors[key.replace(f".{ADAPTER}.weight", ".weight")] = tensor
    settings = _settings(file, header)
    return tensors, lambda key: _scale(settings, _module(key), _rank(tensors, _module(key)))


def attach(pipeline, path: str) -> int:
    """Load any adapter that `read` takes into a stock pipeline; return how many modules it has.

    Raises:
        ValueError: no adapter there, or one of another model.
    """
    tensors, scale = read(path)
    layers = dict(pipeline.transformer.named_modules())
    modules = {_module(key) if key.endswith(WEIGHTS) else key for key in tensors}
    foreign = sorted(module for module in modules if not hasattr(layers.get(module), "weight"))
    if foreign or not modules:
        raise ValueError(
            f"{path}: {len(foreign)} of its {len(modules)} modules are not in this model "
            f"(first: {next(iter(foreign), 'none')}); it was made for another one"
        )
    for key, tensor in tensors.items():
        outer, inner = tensor.shape[0], tensor.shape[-1]
        rows, columns = layers[_module(key)].weight.shape
        if (inner != columns) if key.endswith("lora_A.weight") else (outer != rows):
            raise ValueError(
                f"{path}: {key} has shape {tuple(tensor.shape)}, but its module has "
                f"{(rows, columns)}; it was made for another size of this model"
            )
    pipeline.load_lora_weights(
        {
            f"transformer.{key}": tensor * scale(key) if key.endswith("lora_B.weight") else tensor
            for key, tensor in tensors.items()
        }
    )
    assert pipeline.get_list_adapters(), "diffusers took none of the tensors"
    return len(modules)


def export_state(
    transformer: nn.Module, whole: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[str, Tensor]:
    """Return the adapter's weights on the CPU with alpha / rank folded into B.

    `whole(parameter)` puts a parameter together of which every process has a part.
    """
    config = transformer.peft_config[ADAPTER]
    scale = config.lora_alpha / config.r
    wholes = {key: whole(parameter) for key, parameter in state(transformer).items()}
    return {
        key: (tensor * scale if key.endswith("lora_B.weight") else tensor).detach().cpu().clone()
        for key, tensor in wholes.items()
    }


def _adapter_file(path: Path) -> Path:
    if path.is_file():
        return path
    for folder in (path, path / "lora"):
        for name in (DIFFUSERS_FILE, PEFT_FILE):
            if (folder / name).is_file():
                return folder / name
    if not path.exists():
        beside = sorted(item.name for item in path.parent.glob("*") if item.is_dir())
        raise ValueError(f"{path} does not exist; beside it: {', '.join(beside) or 'nothing'}")
    raise ValueError(
        f"{path} holds no adapter: expected {DIFFUSERS_FILE} (diffusers) or {PEFT_FILE} (PEFT)"
    )


def _settings(file: Path, header: dict[str, str]) -> dict:
    """Return the adapter's PEFT settings, from beside the file or from its header."""
    if "lora_adapter_metadata" in header:
        stored = json.loads(header["lora_adapter_metadata"])
        return {key.removeprefix("transformer."): value for key, value in stored.items()}
    if file.name != PEFT_FILE:
        return {}
    beside = file.parent / "adapter_config.json"
    if not beside.is_file():
        raise ValueError(f"{file.parent} holds no adapter_config.json: the strength is unknown")
    try:
        return json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{beside} is no valid JSON: {error}") from error


def _scale(settings: dict, module: str, rank: int) -> float:
    alpha = settings.get("lora_alpha") or rank
    for pattern, own in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = own
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _module(key: str) -> str:
    return key.partition(".lora_")[0]


def _rank(tensors: dict[str, Tensor], module: str) -> int:
    return len(tensors[f"{module}.lora_A.weight"])
