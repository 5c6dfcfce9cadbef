"""Reference images are found beside their file, checked once, and told apart by content."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_flux
import torch
from accelerate import Accelerator
from PIL import Image

from flow_grpo import images, session
from flow_grpo.data import Prompt, load_prompts
from flow_grpo.models.flux_kontext import FluxKontext
from flow_grpo.models.sd3 import SD3
from flow_grpo.prompt_sets import usable_prompts


@pytest.fixture
def broken_set(edit_set, tmp_path):
    """Return a copy of the set whose first image is cut short and whose second is gone."""
    folder = tmp_path / "broken"
    shutil.copytree(edit_set, folder)
    whole = (folder / "train" / "0.png").read_bytes()
    (folder / "train" / "0.png").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "1.png").unlink()
    return folder


def write_line(folder: Path, image) -> None:
    line = json.dumps({"prompt": "a", "image": image})
    (folder / "train_metadata.jsonl").write_text(f"\n{line}\n")


def read_image(folder: Path, image) -> Prompt:
    write_line(folder, image)
    (prompt,) = load_prompts(folder, "train", "geneval")
    return prompt


def test_images_are_looked_up_beside_the_file_that_names_them(tmp_path, monkeypatch):
    folder = tmp_path / "sets" / "mine"
    folder.mkdir(parents=True)
    one, other = folder / "a.png", tmp_path / "sets" / "b.png"
    elsewhere = tmp_path / "c.png"
    monkeypatch.chdir(tmp_path)
    assert read_image(folder, "a.png").images == (one,)
    assert read_image(folder, ["a.png", "../b.png", str(elsewhere)]).images == (
        one, folder / ".." / "b.png", elsewhere,
    )  # fmt: skip
    assert (folder / ".." / "b.png").resolve() == other
    assert read_image(folder, None).images == ()
    write_line(Path("sets/mine"), "a.png")
    (prompt,) = load_prompts("sets/mine", "train", "geneval")
    assert prompt.images[0].resolve() == one
    assert prompt.source == "sets/mine/train_metadata.jsonl:2"


@pytest.mark.parametrize("value", [3, "", " ", [], ["a.png", 3], ["a.png", ""], {"a": 1}, True])
def test_an_image_is_the_name_of_a_file_or_a_list_of_names(tmp_path, value):
    write_line(tmp_path, value)
    with pytest.raises(ValueError, match=r'jsonl:2: "image" must name a file, or a list of files'):
        load_prompts(tmp_path, "train", "geneval")


def test_the_first_line_with_an_unreadable_image_stops_by_name(broken_set):
    prompts = load_prompts(broken_set, "train", "geneval")
    with pytest.raises(ValueError) as caught:
        images.with_readable_images(prompts, "stop")
    text = str(caught.value)
    assert text.startswith(f"{broken_set}/train_metadata.jsonl:1: reference image {broken_set}")
    assert "0.png cannot be read: " in text
    assert text.endswith(" (and 3 more); unreadable_images=skip leaves such lines out")
    assert images.with_readable_images(prompts[4:], "stop") == prompts[4:]
    with pytest.raises(ValueError, match=r"jsonl:4: reference image .*1.png does not exist; unr"):
        images.with_readable_images(prompts[3:], "stop")


def test_lines_with_unreadable_images_are_named_counted_and_left_out(broken_set, caplog):
    prompts = load_prompts(broken_set, "train", "geneval")
    assert images.with_readable_images(prompts, "skip") == prompts[4:]
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[2].partition(": ")[0][-7:] for line in said[:4]] == [
        f"jsonl:{line}" for line in (1, 2, 3, 4)
    ]
    assert "0.png cannot be read" in said[0]
    assert "1.png does not exist" in said[2]
    assert said[4] == "4 of 6 prompts are left out for their images"
    with pytest.raises(ValueError, match=r"no prompt is left .*; the first: .*jsonl:1: .*0.png"):
        images.with_readable_images(prompts[:4], "skip")


def test_one_unreadable_image_of_several_is_enough(edit_set):
    whole, gone = edit_set / "train" / "0.png", edit_set / "train" / "9.png"
    prompts = [Prompt("a", {}, (whole, gone), "f:1"), Prompt("b", {}, (whole, whole), "f:2")]
    assert images.with_readable_images(prompts, "skip") == prompts[1:]


def test_each_process_decodes_its_share_and_learns_what_all_have_found(broken_set, monkeypatch):
    prompts = load_prompts(broken_set, "train", "geneval")
    opened, open_image = [], images.open_image

    def opening(path):
        opened.append(path.name)
        return open_image(path)

    monkeypatch.setattr(images, "open_image", opening)
    found = []
    for rank in range(2):

        def note(problems):
            found.extend(problems)
            return problems

        kept = images.with_readable_images(
            prompts, "skip", share=slice(rank, None, 2), gathered=note
        )
        assert kept == [p for p in prompts if p.images[0].name != f"{rank}.png"]
    assert sorted(opened) == ["0.png", "1.png", "2.png"]  # each by one process, once
    for _ in range(2):
        kept = images.with_readable_images(
            prompts, "skip", share=slice(0), gathered=lambda none: [*none, *found]
        )
        assert kept == prompts[4:]


def test_the_number_of_images_is_the_familys():
    def prompt(num):
        return Prompt("a", {}, (Path("a.png"),) * num, "f.jsonl:7")

    images.check_counts([prompt(1)], "Family", 1)
    images.check_counts([prompt(3), prompt(3)], "Family", 3)
    with pytest.raises(ValueError, match=r"f.jsonl:7: no reference images, but Family takes one r"):
        images.check_counts([prompt(1), prompt(0)], "Family", 1)
    with pytest.raises(ValueError, match=r"f.jsonl:7: 4 reference images, .* takes 1 to 3 ref"):
        images.check_counts([prompt(4)], "Family", 3)
    with pytest.raises(ValueError, match=r"f.jsonl:7: 2 reference images, but 3 in .* same number"):
        images.check_counts([prompt(3), prompt(2)], "Family", 3)


def test_only_a_family_that_edits_decodes_images(broken_set, tiny_config, caplog, monkeypatch):
    monkeypatch.syspath_prepend("tests")
    config = tiny_config
    config.dataset, config.prompt_fn = str(broken_set), "geneval"
    accelerator = Accelerator(cpu=True)
    assert len(usable_prompts(SD3, config, "train", accelerator)) == 6
    assert "SD3 takes no reference images: those of" in caplog.text
    for given in (None, accelerator):
        with pytest.raises(ValueError, match=r"jsonl:1: reference image .*0.png cannot be read"):
            usable_prompts(FluxKontext, config, "train", given)
    config.unreadable_images = "skip"
    assert len(usable_prompts(FluxKontext, config, "train", accelerator)) == 2


def test_an_unknown_way_with_unreadable_images_is_an_error(tiny_config):
    tiny_config.unreadable_images = "stopp"
    with pytest.raises(ValueError, match=r"unreadable_images 'stopp'; .* did you mean 'stop'\?"):
        session.check_config(tiny_config, 1)


def test_a_reward_is_given_all_images_of_a_prompt_each_read_once(tmp_path, monkeypatch):
    files = [tmp_path / f"{name}.png" for name in "abc"]
    for seed, file in enumerate(files):
        tiny_flux.image(seed, 4 + seed, 3).save(file)
    a, b, c = files
    read = []
    monkeypatch.setattr(
        session, "image_tensor", lambda path: read.append(path) or images.image_tensor(path)
    )
    prompts = [Prompt("x", {}, own, "f") for own in ((a, b), (c,), (b, a), (a, b))]
    run = SimpleNamespace(model=SimpleNamespace(max_images=3))
    given = session.Run.reference_images(run, prompts)
    widths = [tuple(image.shape[-1] for image in own) for own in given]
    assert widths == [(4, 5), (6,), (5, 4), (4, 5)]
    assert given[0][0] is given[2][1] is given[3][0]
    assert sorted(read) == files
    run.model.max_images = 0
    assert session.Run.reference_images(run, prompts) is None


def test_a_tensor_holds_the_files_pixels(tmp_path):
    picture = tiny_flux.image(0, 5, 3).convert("P")
    picture.save(tmp_path / "a.png")
    tensor = images.image_tensor(tmp_path / "a.png")
    assert tensor.shape == (3, 3, 5)
    red = picture.convert("RGB").getpixel((4, 1))[0]
    assert tensor[0, 1, 4] == torch.tensor(red / 255)


def test_a_photograph_stands_upright(tmp_path):
    lying = tiny_flux.image(0, 6, 4)
    exif = lying.getexif()
    exif[0x0112] = 6  # orientation: to be turned clockwise
    lying.save(tmp_path / "a.png", exif=exif)
    upright = lying.transpose(Image.Transpose.ROTATE_270)
    assert images.open_image(tmp_path / "a.png").tobytes() == upright.tobytes()


def test_files_of_one_content_have_one_digest(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny_flux.image(seed).save(tmp_path / f"{name}.png")
    a, b, c = (images.content_digest(tmp_path / f"{name}.png") for name in "abc")
    assert a == b != c
    with pytest.raises(ValueError, match=r"reference image .*d.png cannot be read"):
        images.content_digest(tmp_path / "d.png")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("uint16", "a.png"), ("uint16", "a.tif"), ("int32", "a.tif"), ("float32", "a.tif")],
)
def test_grey_of_more_than_8_bits_is_refused_not_clipped_to_white(dtype, name, tmp_path):
    ramp = np.linspace(0, 65535, 64).reshape(8, 8).astype(dtype)
    Image.fromarray(ramp).save(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be read: it is grey of more than 8 bits"):
        images.open_image(tmp_path / name)


def test_what_a_decoder_of_any_kind_raises_is_an_unreadable_image(tmp_path, monkeypatch):
    """AVIF's raises RuntimeError, which is no OSError."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def decode(self, *args, **kwargs):
        raise RuntimeError("Failed to decode frame 0")

    monkeypatch.setattr(Image.Image, "convert", decode)
    with pytest.raises(ValueError, match=r"a\.png cannot be read: Failed to decode frame 0"):
        images.open_image(tmp_path / "a.png")


def test_the_batches_of_a_group_decode_their_reference_image_once(tmp_path, monkeypatch):
    tiny_flux.image(0).save(tmp_path / "a.png")
    opened, honest = [], images.open_image
    monkeypatch.setattr(images, "open_image", lambda path: opened.append(path) or honest(path))
    first, again = (images.image_tensor(tmp_path / "a.png") for _ in range(2))
    assert opened == [tmp_path / "a.png"]
    assert torch.equal(first, again)
