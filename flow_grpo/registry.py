"""Find rewards, models and algorithms by file name: the folder is the registry."""

import ast
import difflib
import importlib
import importlib.util
import math
import pkgutil
from pathlib import Path


def names(package: str) -> list[str]:
    """List what a package offers, sorted; nothing but the package itself is imported.

    Its sub-packages, and its files with a class named after the file (see `load`). The folder's own
    machinery is no entry: `base`, names that start with `_`, files without such a class.
    """
    return sorted(name for name, source in _files(package).items() if _is_entry(name, source))


def load(package: str, name: str) -> type:
    """Return the class called `name`: a file of the package, or a dotted `module.path:Class`.

    The class of a file bears its name without underscores, in any case: `ocr.Ocr`, `sd3.SD3`.
    Raises ValueError with everything that exists and the nearest match.
    """
    if ":" in name:
        return _load_dotted(name)
    existing = names(package)
    if name not in existing:
        if name in _files(package):
            raise ValueError(_nameless(package, name))
        raise ValueError(unknown(package.rpartition(".")[2].removesuffix("s"), name, existing))
    module = importlib.import_module(f"{package}.{name}")
    for key, value in vars(module).items():
        if isinstance(value, type) and _is_called_after(key, name):
            return value
    raise ValueError(_nameless(package, name))


def metric_name(name: str) -> str:
    """Return the name under which a reward is logged: the file's, for a dotted path too."""
    return name.partition(":")[0].rpartition(".")[2]


def parse_reward_fn(text: str) -> dict[str, float]:
    """Parse `ocr:0.8,jpeg_compressibility:0.2` (or `my_pkg.my_reward:MyReward:1.0`) to weights."""
    weights: dict[str, float] = {}
    for item in (part.strip() for part in text.split(",")):
        name, _, number = (part.strip() for part in item.rpartition(":"))
        if not item or not name:
            raise ValueError(f"reward_fn {text!r}: {item!r} is not name:weight; e.g. ocr:1.0")
        try:
            weight = float(number)
        except ValueError:
            raise ValueError(
                f"reward_fn {text!r}: the weight {number!r} of {name!r} is no number; e.g. ocr:0.8"
            ) from None
        if not math.isfinite(weight):
            raise ValueError(f"reward_fn {text!r}: the weight of {name!r} must be finite")
        if name in weights:
            raise ValueError(f"reward_fn {text!r}: {name!r} is given twice; add its weights up")
        weights[name] = weight
    return weights


def _load_dotted(name: str) -> type:
    path, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
    value = getattr(module, class_name, None)
    if not isinstance(value, type):
        classes = sorted(key for key, item in vars(module).items() if isinstance(item, type))
        raise ValueError(unknown(f"class of {path}", class_name, classes))
    return value


def unknown(kind: str, name: str, existing) -> str:
    """Return the message for a name that does not exist: all there are, and the nearest."""
    nearest = difflib.get_close_matches(name, existing, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {name!r}; there are: {', '.join(existing) or 'none'}{hint}"


def _files(package: str) -> dict[str, Path | None]:
    """Return the source of every module of a package by name; None for a sub-package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"{package!r} is no importable package")
    return {
        module.name: None if module.ispkg else Path(module.module_finder.path, f"{module.name}.py")
        for module in pkgutil.iter_modules(spec.submodule_search_locations)
    }


def _is_entry(name: str, source: Path | None) -> bool:
    if name == "base" or name.startswith("_"):
        return False
    if source is None:
        return True
    body = ast.parse(source.read_text(encoding="utf-8")).body
    return any(
        isinstance(node, ast.ClassDef) and _is_called_after(node.name, name) for node in body
    )


def _nameless(package: str, name: str) -> str:
    camel = "".join(part.capitalize() for part in name.split("_"))
    return f"{package}.{name} has no class named after its file, {camel}"


def _is_called_after(class_name: str, file_name: str) -> bool:
    return class_name.lower() == file_name.replace("_", "").lower()
