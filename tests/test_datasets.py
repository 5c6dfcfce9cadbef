import importlib.util
import io
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flow_grpo import data

ROOT = Path(__file__).resolve().parents[1] / "dataset"
TAGS = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5}


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(ROOT))  # generate.py imports its neighbour, as when it is run
    try:
        spec = importlib.util.spec_from_file_location("dataset_generate", ROOT / "generate.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT))
        for name in ("vocabulary", "drawings"):
            sys.modules.pop(name, None)


TEXT_SETS = ("ocr", "geneval", "pickscore", "pickscore_sfw", "drawbench")
SMALL_SETS = (*TEXT_SETS, "counting_edit")


def shipped(name):
    """Give the folder of a small set, or skip where a public set has been fetched over it."""
    if (ROOT / name / "SOURCE.json").exists():
        pytest.skip(f"dataset/{name} holds the public set here")
    return ROOT / name


def prompts(name, split):
    prompt_fn = "geneval" if name in ("geneval", "counting_edit") else "general_ocr"
    return data.load_prompts(shipped(name), split, prompt_fn)


def test_every_small_set_is_covered_here(generate):
    assert tuple(generate.SETS) == SMALL_SETS


@pytest.mark.parametrize("name", SMALL_SETS)
def test_small_sets_are_what_their_generator_writes(generate, name):
    files = generate.generate(name)
    folder = shipped(name)
    kinds = (".txt", ".jsonl", ".png")
    found = [path for path in folder.rglob("*") if path.suffix in kinds]
    assert {path.relative_to(folder).as_posix() for path in found} == set(files)
    for file, content in files.items():
        if file.endswith(".png"):  # another zlib may pack the same pixels differently
            assert (pixels(folder / file) == pixels(io.BytesIO(content))).all(), file
        else:
            assert (folder / file).read_bytes() == content, file


def pixels(file) -> np.ndarray:
    with Image.open(file) as image:
        assert image.mode == "RGB"
        return np.array(image)


@pytest.mark.parametrize("name", TEXT_SETS)
def test_train_and_test_prompts_are_disjoint(name):
    train, test = ({prompt for prompt, *_ in prompts(name, split)} for split in ("train", "test"))
    assert not train & test


@pytest.mark.parametrize("name", TEXT_SETS)
def test_prompts_are_plain_and_unique_but_for_drawbench(name):
    for split in ("train", "test"):
        lines = [prompt for prompt, *_ in prompts(name, split)]
        assert all(line.isascii() and "{" not in line for line in lines)
        repeats = set(Counter(lines).values())
        assert repeats == ({5} if (name, split) == ("drawbench", "test") else {1})


@pytest.mark.parametrize(
    ("name", "num_train", "num_test"),
    [
        ("ocr", 200, 50),
        ("geneval", 180, 60),
        ("pickscore", 200, 50),
        ("pickscore_sfw", 200, 50),
        ("drawbench", 1, 100),
        ("counting_edit", 72, 24),
    ],
)
def test_sizes_are_those_of_the_readme(name, num_train, num_test):
    sizes = len(prompts(name, "train")), len(prompts(name, "test"))
    assert sizes == (num_train, num_test)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| `{name}` | {num_train} / {num_test} |" in readme


def test_ocr_prompts_quote_one_text_and_the_splits_share_none():
    texts = {}
    for split in ("train", "test"):
        lines = [prompt for prompt, *_ in prompts("ocr", split)]
        assert all(line.count('"') == 2 for line in lines)
        texts[split] = [line.split('"')[1] for line in lines]
        lengths = [len(text.replace(" ", "")) for text in texts[split]]
        assert 2 <= min(lengths) <= max(lengths) <= 27  # as in the public set
    assert not set(texts["train"]) & set(texts["test"])


def test_geneval_has_all_six_tags_in_both_splits():
    train = Counter(entry.metadata["tag"] for entry in prompts("geneval", "train"))
    test = Counter(entry.metadata["tag"] for entry in prompts("geneval", "test"))
    assert set(train) == TAGS
    assert test == dict.fromkeys(TAGS, 10)
    # the published mix, position : counting : color_attr : colors : two_object = 7 : 5 : 3 : 1 : 1
    ratio = [
        train[tag] // 10 for tag in ("position", "counting", "color_attr", "colors", "two_object")
    ]
    assert ratio == [7, 5, 3, 1, 1]


@pytest.mark.parametrize("split", ["train", "test"])
def test_geneval_metadata_says_what_its_prompt_says(split):
    for prompt, metadata, *_ in prompts("geneval", split):
        check = {"exclude"} if metadata["tag"] == "counting" else set()
        assert set(metadata) == {"tag", "include", "prompt"} | check
        assert prompt == metadata["prompt"]
        assert parsed(prompt, metadata["tag"]) == [flat(entry) for entry in metadata["include"]]
        for entry in metadata["include"]:
            assert set(entry) <= {"class", "count", "color", "position"}
        if check:
            (include,), (exclude,) = metadata["include"], metadata["exclude"]
            assert exclude == {"class": include["class"], "count": include["count"] + 1}


def flat(entry):
    return entry["class"], entry["count"], entry.get("color"), entry.get("position")


def parsed(prompt, tag):
    """Read a prompt back into its include entries, with no help from the generator."""
    text = prompt.removeprefix("a photo of ")
    assert text != prompt
    if tag == "counting":
        number, nouns = text.split(" ", 1)
        irregular = {"sheep": "sheep", "knives": "knife"}
        noun = irregular.get(nouns)
        if noun is None:
            long = nouns.endswith(("ches", "shes", "sses", "xes", "buses"))
            noun = nouns.removesuffix("es" if long else "s")
        return [(noun, NUMBERS[number], None, None)]
    if tag == "position":
        for relation in ("left of", "right of", "above", "below"):
            if f" {relation} " in text:
                placed, target = (bare(part) for part in text.split(f" {relation} "))
                return [(target, 1, None, None), (placed, 1, None, [relation, 0])]
        raise AssertionError(prompt)
    parts = [bare(part) for part in text.split(" and ")]
    assert len(parts) == (2 if tag in ("two_object", "color_attr") else 1)
    if tag in ("colors", "color_attr"):
        return [(part.split(" ", 1)[1], 1, part.split(" ", 1)[0], None) for part in parts]
    return [(part, 1, None, None) for part in parts]


def bare(noun_phrase):
    article, rest = noun_phrase.split(" ", 1)
    assert article == ("an" if rest[0] in "aeiou" else "a")
    return rest


def test_geneval_splits_share_no_scene_however_it_is_worded():
    opposites = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

    def scene(metadata):
        entries = [flat(entry) for entry in metadata["include"]]
        if metadata["tag"] == "position":  # a left of b: the same scene as b right of a
            relation, (one, two) = entries[1][3][0], (entries[1][0], entries[0][0])
            turned = (two, opposites[relation], one)
            return frozenset({(one, relation, two), turned})
        return frozenset(str(entry) for entry in entries)

    train = {scene(entry.metadata) for entry in prompts("geneval", "train")}
    test = {scene(entry.metadata) for entry in prompts("geneval", "test")}
    assert len(train) == 180
    assert not train & test


@pytest.mark.parametrize(("split", "num"), [("train", 72), ("test", 24)])
def test_an_edit_says_what_its_picture_shows_and_what_it_should_show(split, num):
    seen = set()
    for prompt, metadata, images, _ in prompts("counting_edit", split):
        (include,), (exclude,) = metadata["include"], metadata["exclude"]
        assert metadata["tag"] == "counting"
        assert (include["count"], exclude["count"]) == (2, 3)
        assert include["class"] == exclude["class"]
        shown = metadata["t2i_prompt"].removeprefix("a drawing of ")
        number = metadata["source_count"]
        if number == 1:
            assert shown == f"one {include['class']}"
        else:
            assert parsed(f"a photo of {shown}", "counting") == [
                (include["class"], number, None, None)
            ]
        plural = {"knife": "knives"}.get(include["class"], f"{include['class']}s")
        assert f"two {plural}" in prompt
        assert "instead" not in prompt or prompt.endswith(shown.split()[0])
        (image,) = images
        assert occupied_cells(pixels(image)) == number != 2
        seen.add(image)
    assert len(seen) == num


def occupied_cells(picture) -> int:
    """Count the cells of 3 x 3 that hold something; an object keeps to its own."""
    assert picture.shape == (256, 256, 3)
    codes = picture.astype(np.int64) @ (65536, 256, 1)
    colors, counts = np.unique(codes, return_counts=True)
    something = codes != colors[counts.argmax()]
    edges = [round(256 / 3 * i) for i in range(4)]
    cells = [
        something[top + 3 : bottom - 3, left + 3 : right - 3]
        for top, bottom in itertools.pairwise(edges)
        for left, right in itertools.pairwise(edges)
    ]
    return sum(bool(cell.any()) for cell in cells)


def test_edits_of_the_two_splits_share_no_class_with_number_and_no_picture():
    scenes, pictures = {}, {}
    for split in ("train", "test"):
        edits = prompts("counting_edit", split)
        scenes[split] = Counter(
            (edit.metadata["include"][0]["class"], edit.metadata["source_count"]) for edit in edits
        )
        pictures[split] = {pixels(edit.images[0]).tobytes() for edit in edits}
        assert set(scenes[split].values()) == {2}
    assert not set(scenes["train"]) & set(scenes["test"])
    assert len(pictures["train"] | pictures["test"]) == 96
    assert Counter(number for _, number in scenes["train"]) == dict.fromkeys((1, 3, 4, 5), 9)
    assert Counter(number for _, number in scenes["test"]) == dict.fromkeys((1, 3, 4, 5), 3)


def test_a_drawn_class_is_one_that_detectors_know(generate):
    assert set(generate.drawings.CLASSES) <= set(generate.words.OBJECTS)


def test_one_scene_has_one_key_so_that_it_falls_into_one_split(generate, monkeypatch):
    monkeypatch.setattr(generate.words, "OBJECTS", ("cup", "dog"))
    monkeypatch.setattr(generate.words, "COLORS", ("red", "blue"))
    draw = generate.Draw(0)
    # a cup (left of, right of, above, below) a dog; a cup and a dog; the two colourings of it
    for tag, num_scenes in (("position", 4), ("two_object", 1), ("color_attr", 2)):
        assert len({generate.GENEVAL_TAGS[tag](draw)[0] for _ in range(200)}) == num_scenes


def test_pickscore_sfw_captions_are_sentences_and_other_than_pickscore():
    sfw = {prompt for split in ("train", "test") for prompt, *_ in prompts("pickscore_sfw", split)}
    assert all(prompt.count(" ") >= 5 for prompt in sfw)
    assert not sfw & {p for split in ("train", "test") for p, *_ in prompts("pickscore", split)}


def test_the_generator_does_not_overwrite_a_set_that_is_not_its_own(generate, tmp_path, capsys):
    arguments = ["drawbench", "--root", str(tmp_path)]
    assert generate.main(arguments) == 0
    assert generate.main(arguments) == 0  # again over its own files
    path = tmp_path / "drawbench" / "test.txt"
    whole = path.read_bytes()
    path.write_text("mine\n")
    assert generate.main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine\n"
    assert generate.main([*arguments, "--force"]) == 0
    assert path.read_bytes() == whole


def test_the_generator_knows_its_pictures_by_what_they_show(
    generate, tmp_path, capsys, monkeypatch
):
    files = generate.generate("counting_edit")
    monkeypatch.setattr(generate, "generate", lambda name: files)  # to draw them once is enough
    arguments = ["counting_edit", "--root", str(tmp_path)]
    assert generate.main(arguments) == 0
    path = tmp_path / "counting_edit" / "images" / "train_00.png"
    whole = path.read_bytes()
    Image.open(path).save(path, compress_level=0)  # the same pixels in other bytes
    packed = path.read_bytes()
    assert packed != whole
    assert generate.main(arguments) == 0
    assert path.read_bytes() == packed
    for other in (b"no picture", (path.parent / "train_01.png").read_bytes()):
        path.write_bytes(other)
        assert generate.main(arguments) == 1
        assert "train_00.png holds another set" in capsys.readouterr().err
    assert generate.main([*arguments, "--force"]) == 0
    assert path.read_bytes() == whole


def test_the_generator_runs_as_the_readme_says(tmp_path):
    command = [sys.executable, str(ROOT / "generate.py"), "geneval", "--root", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    lines = (tmp_path / "geneval" / "train_metadata.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 180
