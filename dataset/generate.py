"""Write the small prompt sets of this folder, the same from their seed.

    python dataset/generate.py              all sets
    python dataset/generate.py ocr geneval  these
    python dataset/generate.py ocr --force  over a fetched or edited set

Every prompt is made here, from templates of this project, and every picture is drawn here (by
Pillow, which may compress the same pixels differently from version to version).
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import drawings
import vocabulary as words

ROOT = Path(__file__).resolve().parent
SEED = 20251130


class Draw:
    """Draw from random.random() alone, the one stream Python keeps the same across versions."""

    def __init__(self, seed: int):
        self.random = random.Random(seed).random

    def index(self, num: int) -> int:
        return int(self.random() * num)

    def one(self, items):
        return items[self.index(len(items))]

    def some(self, items, num: int) -> list:
        """Draw `num` different items, in drawn order."""
        rest = list(items)
        return [rest.pop(self.index(len(rest))) for _ in range(num)]

    def fill(self, template: str, **slots: list[str]) -> str:
        """Replace each {slot} of the template by one item of its list."""
        return template.format(**{slot: self.one(items) for slot, items in slots.items()})


def unique(make: Callable[[], tuple[Hashable, object]], taken: set) -> Iterator:
    """Yield what `make` makes, skipping keys already taken."""
    for _ in range(100_000):
        key, item = make()
        if key not in taken:
            taken.add(key)
            yield item
    raise AssertionError("the templates do not give enough different prompts")


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    if noun in words.PLURALS:
        return words.PLURALS[noun]
    return noun + ("es" if noun.endswith(("s", "ch", "sh", "x")) else "s")


def ocr(draw: Draw) -> dict[str, list[str]]:
    """Prompts with one text in straight quotes; the two splits share no text."""
    texts = list(words.OCR_TEXTS)
    while len(texts) < 250:
        pair = " ".join(draw.some(words.OCR_WORDS, 2))
        if pair not in texts:
            texts.append(pair)
    texts = draw.some(texts, 250)

    def line(text: str) -> str:
        place, style = draw.one(words.OCR_PLACES), draw.one(words.OCR_STYLES)
        return draw.one(words.OCR_FRAMES).format(place=place, style=style, text=f'"{text}"')

    lines = [line(text) for text in texts]
    return {"train.txt": lines[:200], "test.txt": lines[200:]}


def geneval(draw: Draw) -> dict[str, list[str]]:
    """GenEval entries; the splits share none, "A and B" counting as "B and A"."""
    taken: set = set()
    counts = {
        "test_metadata.jsonl": dict.fromkeys(GENEVAL_TAGS, 10),
        "train_metadata.jsonl": {
            "single_object": 10,
            "two_object": 10,
            "counting": 50,
            "colors": 10,
            "position": 70,
            "color_attr": 30,
        },
    }
    files = {}
    for name, tags in counts.items():
        entries = []
        for tag, num in tags.items():
            stream = unique(lambda make=GENEVAL_TAGS[tag]: make(draw), taken)
            entries += [next(stream) for _ in range(num)]
        files[name] = [json.dumps(entry) for entry in draw.some(entries, len(entries))]
    return files


def single_object(draw: Draw):
    noun = draw.one(words.OBJECTS)
    include = [{"class": noun, "count": 1}]
    return ("single", noun), entry("single_object", include, article(noun))


def two_object(draw: Draw):
    one, two = draw.some(words.OBJECTS, 2)
    include = [{"class": one, "count": 1}, {"class": two, "count": 1}]
    text = f"{article(one)} and {article(two)}"
    return ("two", frozenset((one, two))), entry("two_object", include, text)


def counting(draw: Draw):
    noun, num = draw.one(words.OBJECTS), 2 + draw.index(3)
    text = f"{('two', 'three', 'four')[num - 2]} {plural(noun)}"
    include, exclude = [{"class": noun, "count": num}], [{"class": noun, "count": num + 1}]
    return ("counting", noun, num), entry("counting", include, text, exclude)


def colors(draw: Draw):
    noun, color = draw.one(words.OBJECTS), draw.one(words.COLORS)
    include = [{"class": noun, "count": 1, "color": color}]
    return ("colors", noun, color), entry("colors", include, article(f"{color} {noun}"))


def position(draw: Draw):
    """The second entry is placed relative to entry 0; "A left of B" is "B right of A"."""
    target, noun = draw.some(words.OBJECTS, 2)
    relation = draw.one(list(words.OPPOSITES))
    include = [
        {"class": target, "count": 1},
        {"class": noun, "count": 1, "position": [relation, 0]},
    ]
    first = (noun, relation, target)
    key = frozenset((first, (target, words.OPPOSITES[relation], noun)))
    return key, entry("position", include, f"{article(noun)} {relation} {article(target)}")


def color_attr(draw: Draw):
    nouns, tints = draw.some(words.OBJECTS, 2), draw.some(words.COLORS, 2)
    pairs = list(zip(nouns, tints, strict=True))
    include = [{"class": noun, "count": 1, "color": tint} for noun, tint in pairs]
    text = " and ".join(article(f"{tint} {noun}") for noun, tint in pairs)
    return ("color_attr", frozenset(pairs)), entry("color_attr", include, text)


def entry(tag: str, include: list[dict], text: str, exclude: list[dict] | None = None) -> dict:
    excluded = {"exclude": exclude} if exclude else {}
    return {"tag": tag, "include": include, **excluded, "prompt": f"a photo of {text}"}


GENEVAL_TAGS = {
    make.__name__: make
    for make in (single_object, two_object, counting, colors, position, color_attr)
}


def pickscore(draw: Draw) -> dict[str, list[str]]:
    """Short to long captions as people type them into a text-to-image page."""
    slots = {
        "subject": words.SUBJECTS,
        "action": words.ACTIONS,
        "place": words.PLACES,
        "light": words.LIGHTS,
        "medium": words.MEDIA,
        "detail": words.DETAILS,
    }

    def make():
        line = draw.fill(draw.one(words.PICKSCORE_FRAMES), **slots)
        return line, line

    return splits(unique(make, set()), 200, 50)


def pickscore_sfw(draw: Draw) -> dict[str, list[str]]:
    """The same kind of captions, each of six words or more, as in the public set."""
    lines = pickscore(draw)
    taken = set(lines["train.txt"] + lines["test.txt"])
    slots = {
        "subject": words.SUBJECTS,
        "action": words.ACTIONS,
        "place": words.PLACES,
        "light": words.LIGHTS,
        "medium": words.MEDIA,
    }

    def make():
        line = draw.fill(draw.one(words.SFW_FRAMES), **slots)
        return (line if line.count(" ") >= 5 else ""), line

    return splits(unique(make, taken | {""}), 200, 50)


def drawbench(draw: Draw) -> dict[str, list[str]]:
    """Twenty hard prompts, each five times (evaluation only), and one line to train on."""
    lines = draw.some(words.DRAWBENCH, len(words.DRAWBENCH))
    return {"train.txt": lines[:1], "test.txt": [line for line in lines[1:] for _ in range(5)]}


def counting_edit(draw: Draw) -> dict[str, list[str] | bytes]:
    """Edits that make the number of some objects two; the splits share no (class, number)."""
    scenes: dict[str, list] = {"train": [], "test": []}
    for count in (1, 3, 4, 5):
        nouns = draw.some(drawings.CLASSES, len(drawings.CLASSES))
        scenes["train"] += [(noun, count) for noun in nouns[:9]] * 2
        scenes["test"] += [(noun, count) for noun in nouns[9:]] * 2
    files: dict[str, list[str] | bytes] = {}
    for split, part in scenes.items():
        lines = []
        for noun, count in draw.some(part, len(part)):
            name = f"images/{split}_{len(lines):02d}.png"
            files[name] = drawings.png(drawings.scene(noun, count, draw))
            lines.append(json.dumps(edit(noun, count, name, draw)))
        files[f"{split}_metadata.jsonl"] = lines
    return files


def edit(noun: str, count: int, image: str, draw: Draw) -> dict:
    number = ("one", "two", "three", "four", "five")[count - 1]
    there = noun if count == 1 else plural(noun)
    frame = draw.one(words.EDIT_FRAMES)
    return {
        "tag": "counting",
        "include": [{"class": noun, "count": 2}],
        "exclude": [{"class": noun, "count": 3}],
        "t2i_prompt": f"a drawing of {number} {there}",
        "source_count": count,
        "prompt": frame.format(objects=plural(noun), number=number),
        "image": image,
    }


def splits(lines: Iterator[str], num_train: int, num_test: int) -> dict[str, list[str]]:
    return {
        "train.txt": [next(lines) for _ in range(num_train)],
        "test.txt": [next(lines) for _ in range(num_test)],
    }


SETS = {
    make.__name__: make
    for make in (ocr, geneval, pickscore, pickscore_sfw, drawbench, counting_edit)
}


def generate(name: str) -> dict[str, bytes]:
    """Return {file name: content} of a set."""
    files = SETS[name](Draw(SEED + list(SETS).index(name)))
    return {
        file: lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        for file, lines in files.items()
    }


def write(name: str, root: Path, force: bool) -> None:
    """Write a set; a file that says something else is only replaced by force."""
    files = generate(name)
    folder = root / name
    for file, content in files.items():
        path = folder / file
        if not force and path.exists() and not is_same(path, content):
            raise ValueError(f"{path} holds another set (fetched or edited); --force replaces it")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SOURCE.json").unlink(missing_ok=True)
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        if not (path.exists() and is_same(path, content)):
            path.write_bytes(content)


def is_same(path: Path, content: bytes) -> bool:
    """Say whether a file holds `content`; of pictures, whether it shows the same."""
    found = path.read_bytes()
    if path.suffix == ".png":
        return found == content or drawings.same_picture(found, content)
    return found == content


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write the small prompt sets made by this project."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETS) + " (all)")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the sets (this one)")
    parser.add_argument("--force", action="store_true", help="replace fetched or edited sets too")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SETS]
    if unknown:
        parser.error(f"no small set {unknown[0]}; there are {', '.join(SETS)}")
    try:
        for name in options.names or SETS:
            write(name, options.root, options.force)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
