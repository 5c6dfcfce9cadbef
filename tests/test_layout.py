"""Hold the tree to its budgets and its direction of imports, by reading the sources."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from families import FAMILIES
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("flow_grpo", "config", "scripts", "dataset", "tests", "benchmarks")

MAX_TRAIN_SCRIPT_LINES = 30
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LINE_LENGTH = 100
MAX_FILE_BYTES = 500 * 1024  # assets apart: they hold the shipped pipeline's weights

PURE = ("sde", "schedules", "guidance", "rollout", "advantages", "losses", "batching", "seeds")
PLUGIN_FOLDERS = ("models", "rewards", "algorithms")
HEAVY = ("torch", "numpy", "diffusers", "transformers", "accelerate", "peft", "matplotlib")
HEAVY += ("onnxruntime", "rapidocr", "wandb", "tensorboard", "PIL")

# Names that other code uses for what we call x_next, velocity and std; see CONTRIBUTING.md.
FORBIDDEN_WORDS = re.compile(r"\b(prev_sample|noise_pred|std_dev_t)\b")
# In one string each, these would be found in this very file.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
LOCAL_PATHS = re.compile(rb"/(wor" rb"k|ho" rb"me|ro" rb"ot|Use" rb"rs|tm" rb"p/w)/")

# Where the module's name is not the distribution's.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "yaml": "pyyaml",
}
OPTIONAL_MODULES = {"swanlab", "trackio", "deepspeed", "bitsandbytes", "pytest"}


def _tracked() -> list[Path]:
    """Return the files that git tracks or would, deleted ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    names = listed.stdout.decode().rstrip("\0").split("\0")
    return [path for path in (ROOT / name for name in names) if path.is_file()]


def _sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _module(path: Path) -> str:
    """Return the dotted name of a file of the tree."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports(path: Path) -> set[str]:
    """Return every module that a file imports at any depth.

    `from a import b` counts as `a` and `a.b`, since b may be a module.
    """
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno} imports relatively"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _imports_any(path: Path, modules: tuple[str, ...]) -> list[str]:
    """Return which of `modules`, or what lies below them, a file imports."""
    imported = _imports(path)
    return [m for m in modules if any(i == m or i.startswith(m + ".") for i in imported)]


def test_train_scripts_only_name_an_adapter():
    scripts = sorted((ROOT / "scripts").glob("train_*.py"))
    lengths = {_name(path): len(path.read_text().splitlines()) for path in scripts}
    assert lengths, "no train script found"
    assert {n: k for n, k in lengths.items() if k > MAX_TRAIN_SCRIPT_LINES} == {}


def test_no_file_is_longer_than_one_can_read():
    lengths = {_name(p): len(p.read_text().splitlines()) for p in _sources(*CODE_FOLDERS)}
    assert {name: k for name, k in lengths.items() if k > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen():
    too_long = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in _sources(*CODE_FOLDERS)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_no_line_is_too_long():
    files = _sources(*CODE_FOLDERS) + sorted((ROOT / "scripts").rglob("*.sh"))
    too_long = [
        f"{_name(path)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > MAX_LINE_LENGTH
    ]
    assert too_long == []


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_only_tensors_and_each_other(name):
    foreign = {
        module
        for module in _imports(ROOT / "flow_grpo" / f"{name}.py") - {"flow_grpo"}
        if module.split(".")[0] not in {"torch", "numpy", *sys.stdlib_module_names}
        and not (module.startswith("flow_grpo.") and module.split(".")[1] in PURE)
    }
    assert foreign == set()


def test_plugins_never_import_the_trainer():
    plugins = [p for folder in PLUGIN_FOLDERS for p in _sources(f"flow_grpo/{folder}")]
    assert plugins
    assert [_name(p) for p in plugins if _imports_any(p, ("flow_grpo.trainer",))] == []


def test_the_package_imports_neither_scripts_nor_configs():
    outer = ("scripts", "config", "dataset", "tests", "benchmarks")
    assert [_name(p) for p in _sources("flow_grpo") if _imports_any(p, outer)] == []


def _loaded_by(statement: str, candidates: tuple[str, ...]) -> list[str]:
    """Return which of `candidates` a fresh process has loaded after `statement`."""
    code = f"{statement}; import sys; print(*(m for m in {candidates} if m in sys.modules))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_importing_the_package_loads_nothing_heavy():
    assert _loaded_by("import flow_grpo", HEAVY) == []


def test_importing_the_core_loads_nothing_but_tensors():
    core = ", ".join(f"flow_grpo.{name}" for name in PURE)
    assert set(_loaded_by(f"import {core}", HEAVY)) <= {"torch", "numpy"}


def test_the_package_never_prints():
    printing = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources("flow_grpo")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printing == []


def test_every_except_names_what_it_catches():
    bare = [
        f"{_name(path)}:{node.lineno}"
        for path in _sources(*CODE_FOLDERS)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


def test_nothing_is_left_for_later():
    files = _sources(*CODE_FOLDERS) + sorted((ROOT / "scripts").rglob("*.sh"))
    assert [_name(path) for path in files if UNFINISHED.search(path.read_text())] == []


def test_foreign_vocabulary_stays_in_the_compatibility_layer():
    found = [
        f"{_name(path)}: {match}"
        for path in _sources("flow_grpo", "config", "scripts")
        if "diffusers_patch" not in path.parts
        for match in FORBIDDEN_WORDS.findall(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS)
def test_every_plugin_has_a_test(folder):
    tests = _sources("tests")
    imported = set().union(*map(_imports, tests))
    imported |= {f"flow_grpo.models.{name}" for name in FAMILIES}  # the contract has them
    untested = [
        _name(path)
        for path in _sources(f"flow_grpo/{folder}")
        if path.name != "__init__.py"
        and _module(path) not in imported
        and not any(path.stem in test.stem for test in tests)
    ]
    assert untested == []


def test_no_large_file_is_tracked():
    large = {
        _name(path): path.stat().st_size
        for path in _tracked()
        if path.stat().st_size > MAX_FILE_BYTES and not _name(path).startswith("flow_grpo/assets/")
    }
    assert large == {}


def test_nothing_names_a_path_of_one_machine():
    assert [_name(path) for path in _tracked() if LOCAL_PATHS.search(path.read_bytes())] == []


def _requirements() -> dict[str, list[Requirement]]:
    """Return setup.py's BASE and the values of EXTRAS, by the name they are assigned to."""
    found = {}
    for node in _tree(ROOT / "setup.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("BASE", "EXTRAS"):
            value = ast.literal_eval(node.value)
            lines = value if isinstance(value, list) else itertools.chain(*value.values())
            found[ast.unparse(node.targets[0])] = [Requirement(line) for line in lines]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_a_declared_requirement():
    declared = {_normal(requirement.name) for requirement in _requirements()["BASE"]}
    ours = {path.stem for path in _sources("dataset", "scripts")} | set(CODE_FOLDERS)
    ours |= {path.name for path in (ROOT / "scripts").iterdir() if path.is_dir()}
    undeclared = {
        f"{_name(path)}: {top}"
        for path in _sources("flow_grpo", "config", "scripts", "dataset")
        for top in {module.split(".")[0] for module in _imports(path)}
        if top not in sys.stdlib_module_names
        and top not in ours | OPTIONAL_MODULES
        and _normal(DISTRIBUTIONS.get(top, top)) not in declared
    }
    assert undeclared == set()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.13"])
def test_every_requirement_has_one_tested_version_within_its_bound(python):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": python}
    versions = {}
    for pin in pins:
        if pin.marker is None or pin.marker.evaluate(environment):
            assert _normal(pin.name) not in versions, f"{pin.name} is pinned twice"
            (specifier,) = pin.specifier
            versions[_normal(pin.name)] = specifier.version
    for requirement in itertools.chain(*_requirements().values()):
        version = versions[_normal(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"
