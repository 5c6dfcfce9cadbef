"""Hold the documents to the code: what they name exists, and what they show works."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from config.base import locked_config
from flow_grpo import cli, old_names
from flow_grpo.rewards.base import Samples, State

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.zh.md")
GUIDES = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
DOCUMENTS = (*READMES, "CONTRIBUTING.md", "dataset/README.md", *GUIDES)
COMMAND = re.compile(r"\b(?:(?:accelerate launch|torchrun)|(?:bash|python) (?:scripts|dataset)/)")
FOLDERS = ("flow_grpo", "config", "scripts", "dataset", "benchmarks")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _prose(name: str) -> str:
    """Return what a file tells its reader: a document, docstrings, or the comments of a script."""
    text = _read(name)
    if name.endswith(".py"):
        nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, DOCUMENTED))
        return "\n\n".join(ast.get_docstring(node) or "" for node in nodes)
    if name.endswith((".sh", ".yaml")):
        comments = (line.strip() for line in text.splitlines() if line.lstrip().startswith("#"))
        return "\n".join(line.lstrip("# ") for line in comments)
    return text


SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for pattern in ("*.py", "*.sh", "*.yaml", "*.md")
    for path in (ROOT / folder).rglob(pattern)
)
QUOTING = [name for name in SOURCES if name not in DOCUMENTS and COMMAND.search(_prose(name))]


def _commands(text: str) -> list[list[str]]:
    """Return the words of every command that starts a line or a piece of code in it."""
    text = re.sub(r"\s*\\\\?\n\s*", " ", text)
    lines = re.findall(
        rf"(?:^|`)(?:[ \t]|[A-Z_]+=\S* )*({COMMAND.pattern}[^`\n]*)", text, flags=re.M
    )
    lines = (re.sub(r"\[.*?\]|[.;,]$", "", line) for line in lines)  # [what may be left out]
    return [shlex.split(line, comments=True) for line in lines]


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, body) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)


def _has_field(dotted: str) -> bool:
    value = locked_config()
    for key in dotted.split("."):
        if key not in value:
            return False
        value = value[key]
    return True


def _presets(file: str) -> set[str]:
    """Return the functions of a config file that are presets; none in those that make them up."""
    body = ast.parse(_read(file)).body
    functions = {n.name for n in body if hasattr(n, "args")}
    imports = [
        n for n in body if isinstance(n, ast.ImportFrom) and n.module == "config.grpo_families"
    ]
    functions |= {alias.name for n in imports for alias in n.names}
    presets = {name for name in functions - {"get_config"} if not name.startswith("_")}
    return presets if "get_config" in functions else set()


def _config_files() -> list[str]:
    files = sorted(f"config/{path.name}" for path in (ROOT / "config").glob("*.py"))
    return [file for file in files if _presets(file)]


def _load(file: str, preset: str):
    return importlib.import_module(f"config.{Path(file).stem}").get_config(preset)


def _tables(name: str) -> dict[str, str]:
    """Return {config file: its table of presets}, by the header's first cell."""
    found = re.findall(r"^\| `(config/\w+\.py):` \|(.*?)^$", _read(name), flags=re.M | re.S)
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize("name", [*DOCUMENTS, *QUOTING])
def test_every_override_that_is_shown_exists(name):
    shown = set(re.findall(r"--config\.([\w.]+)", _prose(name))) - {"KEY"}
    assert {field for field in shown if not _has_field(field)} == set()


@pytest.mark.parametrize("name", [*READMES, *GUIDES])
def test_every_field_that_is_named_exists(name):
    pattern = r"`((?:sample|train|eval|reward|pretrained)\.(?!py\b)\w+)"
    named = set(re.findall(pattern, _read(name)))
    assert named or name == "docs/results.md"
    assert {field for field in named if not _has_field(field)} == set()


@pytest.mark.parametrize("name", [*DOCUMENTS, *QUOTING])
def test_every_script_that_is_named_exists(name):
    folders = "scripts|dataset|config|tests|benchmarks"
    named = set(re.findall(rf"\b((?:{folders})/[\w/]+\.(?:py|sh|yaml))", _prose(name)))
    missing = {path for path in named if not (ROOT / path).is_file()}
    # The files that CONTRIBUTING tells its reader to write.
    assert missing - {"scripts/train_my_model.py", "tests/rewards/test_brightness.py"} == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_local_link_leads_somewhere(name):
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", _read(name))
    folder = (ROOT / name).parent
    assert [target for target in targets if not (folder / target).exists()] == []


@pytest.mark.parametrize("name", READMES)
def test_the_tables_of_presets_are_complete(name):
    tables = _tables(name)
    assert sorted(tables) == _config_files()
    for file, table in tables.items():
        rows = re.findall(r"^\| `(\w+)` \|", table, flags=re.M)
        assert len(rows) == len(set(rows))
        assert set(rows) == _presets(file), file


@pytest.mark.parametrize("name", [*DOCUMENTS, *QUOTING])
def test_every_preset_that_is_named_loads(name):
    used = set(re.findall(r"\b((?:config/)?\w+\.py):([a-z]\w+)", _prose(name)))
    used = {(f"config/{file.removeprefix('config/')}", preset) for file, preset in used}
    assert used or name not in READMES
    for file, preset in used:
        assert preset in _presets(file)
        _load(file, preset)


@pytest.mark.parametrize("name", READMES)
def test_sizes_and_rewards_in_the_tables_of_presets_are_those_of_the_presets(name):
    for file, table in _tables(name).items():
        rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\| (\d+) x (\d+) \|", table, flags=re.M)
        assert {row[0] for row in rows} == _presets(file)
        for preset, rewards, groups, size in rows:
            config = _load(file, preset)
            assert set(re.findall(r"`(\w+)`", rewards)) == set(config.reward_fn), preset
            sample = config.sample
            assert (sample.groups_per_epoch, sample.group_size) == (int(groups), int(size)), preset


@pytest.mark.parametrize("name", [*DOCUMENTS, *QUOTING])
def test_every_flag_of_a_command_exists(name):
    """A launcher's by its own parser; another script's as it is written in that script."""
    for command in _commands(_prose(name)):
        if len(command) < 3:  # a name alone
            continue
        if not command[1].endswith((".py", ".sh")):
            accelerate = command[0] == "accelerate"
            parser = launch_command_parser() if accelerate else get_args_parser()
            launched = parser.parse_args(command[2 if accelerate else 1 :])
            command = ["python", launched.training_script, *launched.training_script_args]
        script, found = command[1], (re.match(r"--[\w.]+", word) for word in command[2:])
        flags = [match[0] for match in found if match]
        assert (ROOT / script).is_file()
        known = set(re.findall(r"--\w+", _read(script)))
        if script.startswith("scripts/train_") or "_node/" in script:
            flags = [flag for flag in flags if not flag.startswith("--config.")]
            known = set(re.findall(r"--\w+", cli.HELP))
        assert {*flags} - known == set()


def test_commands_are_found_where_they_are_quoted():
    known = {"README.md", "docs/faq.md", "config/dpo.py", "scripts/train_sd3.py"}
    known |= {"scripts/demo/sde_demo.py", "scripts/multi_node/sd3.sh"}
    assert [name for name in known if not _commands(_prose(name))] == []
    assert _commands("# A=1 B= bash scripts/a.sh 0 [X ...]") == []
    assert _commands("A=1 B= bash scripts/a.sh 0 [X ...]") == [["bash", "scripts/a.sh", "0"]]
    assert _commands("see `torchrun a.py \\\n  'x y'`.") == [["torchrun", "a.py", "x y"]]


def test_both_readmes_show_the_same_commands():
    assert _blocks(_read("README.md")) == _blocks(_read("README.zh.md"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_number_is_left_out(name):
    assert re.findall(r"@@\w+@@", _read(name)) == []


def test_the_table_of_old_names_is_complete():
    text = _read("CONTRIBUTING.md")
    assert [name for name in old_names.OLD_NAMES if f"`{name}`" not in text] == []
    for old, new in old_names.RENAMED.items():
        (row,) = re.findall(rf"^\| `{re.escape(old)}`.*$", text, flags=re.M)
        assert f"`{new}`" in row


def test_the_reward_in_the_guide_works():
    (source,) = (body for lang, body in _blocks(_read("CONTRIBUTING.md")) if lang == "python")
    namespace = {}
    exec(source, namespace)  # our own document
    images = torch.stack([torch.zeros(3, 4, 4), torch.full((3, 4, 4), 0.5)])
    scores = namespace["Brightness"]()(Samples(images, ["black", "grey"], [{}, {}]))
    assert scores.values.tolist() == [0.0, 0.5]
    assert scores.states.tolist() == [State.OK, State.OK]
