"""Add, load and export LoRA adapters in the formats that users have.

Exports have alpha folded into B, so diffusers and ComfyUI apply the same strength without reading
metadata. Imports take a diffusers file or folder (alpha from its header) or a PEFT folder (alpha
from adapter_config.json).
"""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

ADAPTER = "default"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"


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
    """Return {module.lora_A.weight: tensor} of the adapter, without adapter name or prefix."""
    from peft.utils import get_peft_model_state_dict

    return get_peft_model_state_dict(transformer, adapter_name=ADAPTER)


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
        if key.endswith("lora_B.weight"):
            tensor = tensor * (scale(key) / (config.lora_alpha / config.r))
        if tensor.shape != own[key].shape:
            rank = min(tensor.shape)
            raise ValueError(
                f"{path}: {key} has shape {tuple(tensor.shape)}, expected {tuple(own[key].shape)}; "
                f"set train.lora_rank to the file's rank ({rank})"
            )
        own[key].data.copy_(tensor)
    return len(matched)


def read(path: str):
    """Return ({module.lora_A.weight: tensor}, scale) of a diffusers or PEFT adapter.

    `scale(key)` is alpha / rank of the module that `key` belongs to.
    """
    file = _adapter_file(Path(path))
    with safe_open(file, framework="pt") as handle:
        raw = {key: handle.get_tensor(key) for key in handle.keys()}
        header = handle.metadata() or {}
    tensors = {}
    for key, tensor in raw.items():
        for prefix in ("transformer.", "base_model.model."):
            key = key.removeprefix(prefix)
        tensors[key.replace(f".{ADAPTER}.weight", ".weight")] = tensor
    alpha, rank = None, None
    peft_config = file.parent / "adapter_config.json"
    if file.name == PEFT_FILE and peft_config.is_file():
        settings = json.loads(peft_config.read_text())
        alpha, rank = settings["lora_alpha"], settings["r"]
    elif "lora_adapter_metadata" in header:
        settings = json.loads(header["lora_adapter_metadata"])
        alpha, rank = settings.get("transformer.lora_alpha"), settings.get("transformer.r")
    value = 1.0 if not alpha else alpha / rank
    return tensors, lambda key: value


def export_state(transformer: nn.Module) -> dict[str, Tensor]:
    """Return the adapter's weights on the CPU with alpha / rank folded into B."""
    config = transformer.peft_config[ADAPTER]
    scale = config.lora_alpha / config.r
    return {
        key: (tensor * scale if key.endswith("lora_B.weight") else tensor).detach().cpu().clone()
        for key, tensor in state(transformer).items()
    }


def _adapter_file(path: Path) -> Path:
    if path.is_file():
        return path
    for folder in (path, path / "lora"):
        for name in (DIFFUSERS_FILE, PEFT_FILE):
            if (folder / name).is_file():
                return folder / name
    raise ValueError(
        f"{path} holds no adapter: expected {DIFFUSERS_FILE} (diffusers) or {PEFT_FILE} (PEFT)"
    )
