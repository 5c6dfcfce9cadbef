"""Find rewards, models and algorithms by file name: the folder is the registry."""

import difflib
import importlib
import importlib.util
import math
import pkgutil

INFRASTRUCTURE = frozenset({"base", "client"})  # files of such a folder that are no entry of it


def names(package: str) -> list[str]:
    """List what a package offers, sorted; nothing but the package itself is imported.

    Modules and sub-packages count, but for `base`, `client` and names that start with `_`.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ValueError(f"{package!r} is no importable package")
    found = (module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return sorted(n for n in found if n not in INFRASTRUCTURE and not n.startswith("_"))


def load(package: str, name: str) -> type:
    """Return the class called `name`: a file of the package, or a dotted `module.path:Class`.

    The class of a file bears its name without underscores, in any case: `ocr.Ocr`, `sd3.SD3`.
    Raises ValueError with everything that exists and the nearest match.
    """
    if ":" in name:
        return _load_dotted(name)
    existing = names(package)
    if name not in existing:
        raise ValueError(unknown(_kind(package), name, existing))
    module = importlib.import_module(f"{package}.{name}")
    wanted = name.replace("_", "").lower()
    for key, value in vars(module).items():
        own = isinstance(value, type) and value.__module__.startswith(module.__name__)
        if own and key.replace("_", "").lower() == wanted:
            return value
    camel = "".join(part.capitalize() for part in name.split("_"))
    raise ValueError(f"{module.__name__} has no class named after the file; expected {camel}")


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


def _kind(package: str) -> str:
    return package.rpartition(".")[2].removesuffix("s")


def unknown(kind: str, name: str, existing) -> str:
    """Return the message for a name that does not exist: all there are, and the nearest."""
    nearest = difflib.get_close_matches(name, existing, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {name!r}; there are: {', '.join(existing) or 'none'}{hint}"
