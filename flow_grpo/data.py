"""Prompt sets on disk, and which of their prompts an epoch draws.

A set is a folder. `general_ocr` reads `{split}.txt`, a prompt a line; `geneval` reads
`{split}_metadata.jsonl`, an object with a "prompt" a line, kept whole as the metadata. Sets for
editing have an "image" there too: a file or a list of files, relative to the folder.
"""

import difflib
import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flow_grpo import seeds

logger = logging.getLogger(__name__)

REPO_ROOT = Path(__file__).resolve().parents[1]


class Prompt(NamedTuple):
    prompt: str
    metadata: dict
    images: tuple[Path, ...] = ()  # files of the reference images, of sets for editing
    source: str = ""  # file:line


def load_prompts(dataset: str | Path, split: str, prompt_fn: str) -> list[Prompt]:
    """Read one split of a prompt set, in file order, duplicates kept.

    A relative `dataset` is looked up from the current directory, then, in an editable install,
    from the repository's root. Blank lines are skipped. Raises ValueError for a folder or file
    that is missing, empty or malformed, and for an unknown `prompt_fn`.
    """
    if prompt_fn not in PROMPT_FNS:
        raise ValueError(_unknown_prompt_fn(prompt_fn))
    file_name, read = PROMPT_FNS[prompt_fn]
    folder = _find_folder(dataset)
    path = folder / file_name.format(split=split)
    if not path.is_file():
        raise ValueError(_missing_file(folder, path.name, split, prompt_fn))
    prompts = list(read(path))
    if not prompts:
        raise ValueError(
            f"{path} holds no prompts; a {prompt_fn} set needs at least one non-blank line"
        )
    if folder.name == "pickscore":
        _warn_about_pickscore()
    return prompts


def epoch_prompt_indices(
    num_prompts: int, groups_per_epoch: int, *, seed: int, epoch: int
) -> list[int]:
    """Choose the prompt of each group of an epoch, (groups_per_epoch,) indices.

    Epochs are consecutive slices of one endless stream of shuffled passes over the set, so no
    prompt comes again before all have come once. A function of its arguments alone: the same for
    any world size, worker count or resume. Two draws of a prompt in one epoch are two groups.
    """
    for name, value, least in (
        ("num_prompts", num_prompts, 1),
        ("groups_per_epoch", groups_per_epoch, 1),
        ("epoch", epoch, 0),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; the least allowed is {least}")
    indices: list[int] = []
    position = epoch * groups_per_epoch
    end = position + groups_per_epoch
    while position < end:
        shuffle, start = divmod(position, num_prompts)
        order = seeds.permutation(num_prompts, seed, seeds.PROMPTS, epoch=shuffle)
        taken = order[start : start + end - position].tolist()
        indices += taken
        position += len(taken)
    return indices


def _text_prompts(path: Path) -> Iterator[Prompt]:
    for number, line in _lines(path):
        yield Prompt(line, {}, source=f"{path}:{number}")


def _geneval_prompts(path: Path) -> Iterator[Prompt]:
    for number, line in _lines(path):
        try:
            metadata = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a line of JSON ({error.msg})") from error
        if not isinstance(metadata, dict):
            found = type(metadata).__name__
            raise ValueError(
                f'{path}:{number}: expected an object like {{"prompt": ...}}, found a {found}'
            )
        prompt = metadata.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            keys = ", ".join(metadata) or "none"
            raise ValueError(
                f'{path}:{number}: "prompt" must be a non-empty string; found {prompt!r} '
                f"(keys: {keys})"
            )
        images = _image_files(metadata.get("image"), path, number)
        yield Prompt(prompt.strip(), metadata, images, f"{path}:{number}")


def _image_files(value, path: Path, number: int) -> tuple[Path, ...]:
    """Return the files that an "image" names, one or several."""
    if value is None:
        return ()
    names = value if isinstance(value, list) and value else [value]
    for name in names:
        if not (isinstance(name, str) and name.strip()):
            raise ValueError(
                f'{path}:{number}: "image" must name a file, or a list of files; found {value!r}'
            )
    return tuple(path.parent / name for name in names)


PROMPT_FNS = {
    "general_ocr": ("{split}.txt", _text_prompts),
    "geneval": ("{split}_metadata.jsonl", _geneval_prompts),
}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, stripped line) for each line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from error


def _find_folder(dataset: str | Path) -> Path:
    if not str(dataset).strip():
        raise ValueError("dataset is empty; name a folder, e.g. dataset/ocr")
    path = Path(dataset).expanduser()
    candidates = [path]
    if not path.is_absolute() and (REPO_ROOT / "setup.py").is_file():
        candidates.append(REPO_ROOT / path)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise ValueError(_missing_folder(dataset, candidates))


def _missing_folder(dataset: str | Path, candidates: list[Path]) -> str:
    if candidates[0].is_file():
        return f"dataset {dataset} is a file; name the folder that holds it: {candidates[0].parent}"
    looked = " and ".join(dict.fromkeys(str(candidate.absolute()) for candidate in candidates))
    name = candidates[0].name
    siblings = sorted(
        {
            folder.name
            for candidate in candidates
            if candidate.parent.is_dir()
            for folder in candidate.parent.iterdir()
            if folder.is_dir() and not folder.name.startswith((".", "_"))
        }
    )
    beside = ", ".join(siblings) or "nothing"
    return (
        f"no dataset folder {dataset} (looked at {looked}); beside it: {beside}"
        f"{_nearest(name, siblings)}. A public set: python dataset/fetch.py {name} (--list: which)"
    )


def _missing_file(folder: Path, file_name: str, split: str, prompt_fn: str) -> str:
    present = sorted(path.name for path in folder.iterdir() if path.is_file())
    others = [
        other
        for other, (pattern, _) in PROMPT_FNS.items()
        if other != prompt_fn and pattern.format(split=split) in present
    ]
    hint = f"; prompt_fn {others[0]} would read {split} here" if others else ""
    return (
        f"{folder} has no {file_name} (prompt_fn {prompt_fn}, split {split}); it holds: "
        f"{', '.join(present) or 'nothing'}{hint}. "
        f"A public set: python dataset/fetch.py {folder.name} (--list: which)"
    )


def _unknown_prompt_fn(prompt_fn: str) -> str:
    names = list(PROMPT_FNS)
    return f"unknown prompt_fn {prompt_fn!r}; there are {', '.join(names)}" + _nearest(
        prompt_fn, names
    )


def _nearest(name: str, names: list[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


@functools.cache
def _warn_about_pickscore() -> None:
    """Warn once a process: presets use the filtered set."""
    logger.warning(
        "dataset/pickscore: the public PickScore set of this name holds unsafe prompts; "
        "dataset/pickscore_sfw is its filtered form"
    )
