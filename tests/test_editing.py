"""A family that edits trains on the shipped set with a reward that needs no weights."""

import json

import pytest
from test_report import Page

from flow_grpo import trainer
from flow_grpo.models.flux_kontext import FluxKontext


@pytest.fixture
def edit_arguments(tiny_arguments, tiny_flux_kontext_dir):
    """Return the command line of a short run of the tiny FLUX.1-Kontext on counting_edit."""
    return [
        *tiny_arguments, f"--config.pretrained.model={tiny_flux_kontext_dir}",
        "--config.dataset=dataset/counting_edit", "--config.prompt_fn=geneval",
        "--config.reward_fn=pixel_similarity:0.5,jpeg_compressibility:0.5",
        "--config.sample.max_sequence_length=32", "--config.num_epochs=1",
    ]  # fmt: skip


def test_a_run_on_the_shipped_set_shows_what_it_edited(
    edit_arguments, train, tmp_path, monkeypatch
):
    tracked = []
    monkeypatch.setattr(trainer, "log_images", lambda trackers, shown, *_: tracked.append(shown))
    outcome = train(*edit_arguments, adapter=FluxKontext)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < lines[-1]["eval/pixel_similarity"] < 1
    assert all(not key.startswith("failed/") for line in lines for key in line)
    assert {shown["eval/images"].shape for shown in tracked} == {(4, 3, 32, 64)}
    page = Page((folder / "report.html").read_text())
    assert "to edit" in page.words
    assert sum(image["alt"].endswith(", to edit") for image in page.images) == 4
    kept = folder / "samples" / "epoch-000001"
    assert len(list(kept.glob("*_reference_0.jpg"))) == len(list(kept.glob("*.png"))) == 4


@pytest.mark.parametrize("more", [[], ["--dry_run"]])
def test_a_set_without_images_is_one_error_before_the_model_is_loaded(
    edit_arguments, train, monkeypatch, more
):
    monkeypatch.setattr(FluxKontext, "load", None)
    outcome = train(*edit_arguments, "--config.dataset=dataset/geneval", *more, adapter=FluxKontext)
    assert "geneval/train_metadata.jsonl:1: no reference images, but Flux" in outcome.error
    assert 'named by the "image" of a .jsonl line' in outcome.error


def test_a_missing_image_stops_the_run_with_its_line(edit_arguments, edit_set, train, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        text = (edit_set / f"{split}_metadata.jsonl").read_text()
        (folder / f"{split}_metadata.jsonl").write_text(text)
        (folder / split).symlink_to(edit_set / split)
    lines = (folder / "test_metadata.jsonl").read_text().splitlines()
    lines[2] = lines[2].replace("test/1.png", "test/gone.png")
    (folder / "test_metadata.jsonl").write_text("\n".join(lines))
    call = [*edit_arguments, f"--config.dataset={folder}"]
    line = f"{folder}/test_metadata.jsonl:3: reference image {folder}/test/gone.png"
    assert line in train(*call, adapter=FluxKontext).error
    outcome = train(*call, "--config.unreadable_images=skip", adapter=FluxKontext)
    assert outcome.code == 0, outcome.err
    assert f"left out: {line}" in outcome.err
    assert "1 of 6 prompts are left out for their images" in outcome.err
