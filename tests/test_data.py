import json
import logging
from collections import Counter

import pytest

from flow_grpo import data, seeds


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def message_of(call, *arguments):
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_text_prompts_are_the_stripped_lines_that_are_not_blank(tmp_path):
    write(tmp_path / "train.txt", '  a sign that reads "HI"  \n\n \t\na cat\r\n\u4e00\u53ea\u732b')
    prompts = data.load_prompts(tmp_path, "train", "general_ocr")
    assert [p[:2] for p in prompts] == [
        ('a sign that reads "HI"', {}),
        ("a cat", {}),
        ("\u4e00\u53ea\u732b", {}),
    ]
    assert prompts[0].prompt == 'a sign that reads "HI"'


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfa cat\n")
    assert data.load_prompts(tmp_path, "train", "general_ocr")[0].prompt == "a cat"


def test_geneval_keeps_the_whole_line_as_metadata_and_repeated_lines_twice(tmp_path):
    entry = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "two cups"}
    write(tmp_path / "test_metadata.jsonl", f"{json.dumps(entry)}\n\n{json.dumps(entry)}\n")
    assert data.load_prompts(tmp_path, "test", "geneval") == [
        ("two cups", entry, (), f"{tmp_path}/test_metadata.jsonl:{line}") for line in (1, 3)
    ]


def test_a_missing_folder_names_its_neighbours_and_the_way_to_get_it(tmp_path):
    for name in ("ocr", "geneval"):
        write(tmp_path / "dataset" / name / "train.txt", "a\n")
    text = message_of(data.load_prompts, tmp_path / "dataset" / "genevall", "train", "geneval")
    assert "geneval, ocr" in text
    assert "did you mean geneval?" in text
    assert "python dataset/fetch.py genevall" in text


def test_a_missing_split_names_the_files_that_are_there(tmp_path):
    write(tmp_path / "drawbench" / "test.txt", "a\n")
    text = message_of(data.load_prompts, tmp_path / "drawbench", "train", "general_ocr")
    assert "has no train.txt" in text
    assert "it holds: test.txt" in text
    assert "python dataset/fetch.py drawbench" in text


def test_a_set_of_the_other_format_names_the_prompt_fn_that_reads_it(tmp_path):
    write(tmp_path / "train.txt", "a\n")
    text = message_of(data.load_prompts, tmp_path, "train", "geneval")
    assert "has no train_metadata.jsonl" in text
    assert "prompt_fn general_ocr would read train here" in text


def test_a_file_given_as_the_folder_is_an_error_that_names_the_folder(tmp_path):
    path = write(tmp_path / "train.txt", "a\n")
    assert f"name the folder that holds it: {tmp_path}" in message_of(
        data.load_prompts, path, "train", "general_ocr"
    )


@pytest.mark.parametrize("dataset", ["", "  "])
def test_an_empty_dataset_name_is_an_error(dataset):
    assert "dataset is empty" in message_of(data.load_prompts, dataset, "train", "general_ocr")


@pytest.mark.parametrize("text", ["", "\n", " \n\t\n"])
def test_a_file_without_prompts_is_an_error(tmp_path, text):
    write(tmp_path / "train.txt", text)
    write(tmp_path / "train_metadata.jsonl", text)
    for prompt_fn in data.PROMPT_FNS:
        assert "holds no prompts" in message_of(data.load_prompts, tmp_path, "train", prompt_fn)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "two cups"', "not a line of JSON"),
        ('["two cups"]', "found a list"),
        ('{"tag": "counting", "text": "two cups"}', "(keys: tag, text)"),
        ('{"prompt": "  "}', '"prompt" must be a non-empty string'),
        ('{"prompt": 2}', "found 2"),
    ],
)
def test_a_bad_geneval_line_is_named_by_file_and_number(tmp_path, line, complaint):
    path = write(tmp_path / "train_metadata.jsonl", f'{{"prompt": "a cup"}}\n\n{line}\n')
    text = message_of(data.load_prompts, tmp_path, "train", "geneval")
    assert text.startswith(f"{path}:3: ")
    assert complaint in text


def test_a_file_that_is_not_utf_8_is_an_error(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"caf\xe9\n")
    assert "is not UTF-8" in message_of(data.load_prompts, tmp_path, "train", "general_ocr")


def test_an_unknown_prompt_fn_names_the_nearest(tmp_path):
    text = message_of(data.load_prompts, tmp_path, "train", "general-ocr")
    assert "there are general_ocr, geneval (did you mean general_ocr?)" in text


def test_a_relative_dataset_is_found_here_first_and_then_in_the_repository(tmp_path, monkeypatch):
    here, repo = tmp_path / "here", tmp_path / "repo"
    write(here / "dataset" / "mine" / "train.txt", "here\n")
    write(repo / "dataset" / "mine" / "train.txt", "repo\n")
    write(repo / "dataset" / "shipped" / "train.txt", "repo\n")
    write(repo / "setup.py", "")
    monkeypatch.chdir(here)
    monkeypatch.setattr(data, "REPO_ROOT", repo)
    assert data.load_prompts("dataset/mine", "train", "general_ocr")[0].prompt == "here"
    assert data.load_prompts("dataset/shipped", "train", "general_ocr")[0].prompt == "repo"
    text = message_of(data.load_prompts, "dataset/absent", "train", "general_ocr")
    assert str(here / "dataset" / "absent") in text
    assert str(repo / "dataset" / "absent") in text
    assert "mine, shipped" in text


def test_an_installed_package_does_not_look_beside_itself(tmp_path, monkeypatch):
    write(tmp_path / "site-packages" / "dataset" / "ocr" / "train.txt", "a\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "REPO_ROOT", tmp_path / "site-packages")  # no setup.py there
    assert "no dataset folder" in message_of(
        data.load_prompts, "dataset/ocr", "train", "general_ocr"
    )


def test_pickscore_warns_once_and_names_the_filtered_set(tmp_path, caplog):
    for name in ("pickscore", "pickscore_sfw"):
        write(tmp_path / name / "train.txt", "a\n")
    data._warn_about_pickscore.cache_clear()
    with caplog.at_level(logging.WARNING):
        data.load_prompts(tmp_path / "pickscore_sfw", "train", "general_ocr")
        assert caplog.text == ""
        for _ in range(3):
            data.load_prompts(tmp_path / "pickscore", "train", "general_ocr")
    assert len(caplog.records) == 1
    assert "dataset/pickscore_sfw" in caplog.text


@pytest.mark.parametrize(("num_prompts", "groups"), [(10, 4), (7, 7), (48, 1), (5, 12), (1, 3)])
def test_no_prompt_comes_again_before_all_have_come(num_prompts, groups):
    drawn = []
    for epoch in range(2 * num_prompts):
        indices = data.epoch_prompt_indices(num_prompts, groups, seed=3, epoch=epoch)
        assert len(indices) == groups
        assert all(type(index) is int for index in indices)
        drawn += indices
    for start in range(0, len(drawn), num_prompts):  # 2 * groups whole passes
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))


def test_an_epoch_larger_than_the_set_draws_a_prompt_as_several_groups():
    counts = Counter(data.epoch_prompt_indices(5, 12, seed=0, epoch=0))
    assert sorted(counts.values()) == [2, 2, 2, 3, 3]  # 12 = 2 * 5 + 2


def test_prompts_of_an_epoch_depend_on_seed_and_epoch_only():
    forward = [data.epoch_prompt_indices(100, 8, seed=5, epoch=epoch) for epoch in range(30)]
    backward = [
        data.epoch_prompt_indices(100, 8, seed=5, epoch=epoch) for epoch in range(29, -1, -1)
    ]
    assert forward == backward[::-1]
    assert len(set(map(tuple, forward))) == 30  # a stuck sampler gives one set for ever
    assert forward != [data.epoch_prompt_indices(100, 8, seed=6, epoch=e) for e in range(30)]


def test_prompts_have_a_random_stream_of_their_own():
    second_pass = seeds.permutation(20, 1, seeds.PROMPTS, epoch=1).tolist()
    assert data.epoch_prompt_indices(20, 20, seed=1, epoch=1) == second_pass


def test_passes_over_the_set_differ_in_order():
    passes = {tuple(data.epoch_prompt_indices(20, 20, seed=1, epoch=epoch)) for epoch in range(6)}
    assert len(passes) == 6
    assert tuple(range(20)) not in passes


@pytest.mark.parametrize(
    ("num_prompts", "groups", "epoch", "name"),
    [(0, 4, 0, "num_prompts"), (4, 0, 0, "groups_per_epoch"), (4, 4, -1, "epoch")],
)
def test_impossible_numbers_are_errors(num_prompts, groups, epoch, name):
    with pytest.raises(ValueError, match=f"^{name} is"):
        data.epoch_prompt_indices(num_prompts, groups, seed=0, epoch=epoch)
