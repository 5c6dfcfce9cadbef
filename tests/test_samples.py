"""Edited images are shown with what they were made from: in the folder, the report, trackers."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from test_report import Page

from flow_grpo.report import render_report
from flow_grpo.samples import beside, read_samples, save_samples


def plain(height: int, width: int, *color: float) -> torch.Tensor:
    return torch.tensor(color).view(3, 1, 1).expand(3, height, width)


REFERENCES = [
    (plain(8, 8, 1.0, 0.0, 0.0), plain(64, 32, 0.0, 0.0, 1.0)),
    (plain(6, 12, 0.0, 1.0, 0.0),),
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    for epoch in (0, 1):
        images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(epoch))
        scores = {"ocr": [0.0, 0.0]}
        save_samples(tmp_path, epoch, images, ["make it a", "make it b"], scores, REFERENCES)
    return tmp_path


def test_references_lie_beside_their_image_no_larger_than_it(run):
    first, second = read_samples(run)[1]
    folder = run / "samples" / "epoch-000001"
    assert first["references"] == [folder / f"000_reference_{place}.jpg" for place in (0, 1)]
    assert second["references"] == [folder / "001_reference_0.jpg"]
    shown = [Image.open(path) for path in first["references"] + second["references"]]
    assert [image.size for image in shown] == [(8, 8), (8, 16), (12, 6)]
    middles = [np.asarray(image)[2, 2] / 255 for image in shown]
    np.testing.assert_allclose(middles, np.eye(3)[[0, 2, 1]], atol=0.02)  # JPEG
    entries = json.loads((folder / "scores.json").read_text())
    assert entries[1]["references"] == ["001_reference_0.jpg"]


def test_the_report_shows_what_was_edited_before_the_images(run):
    page = Page(render_report(run))
    alts = [image["alt"] for image in page.images]
    assert alts == [
        *["make it a, to edit"] * 2, "make it a, epoch 0", "make it a, epoch 1",
        "make it b, to edit", "make it b, epoch 0", "make it b, epoch 1",
    ]  # fmt: skip
    assert page.images[0]["src"].startswith("data:image/jpeg;base64,")
    assert page.words.count("to edit") == 1
    rows = render_report(run).partition('class="grid"')[2].partition("</table>")[0].split("<tr>")
    assert [row.count("<td") + row.count("<th") for row in rows[1:]] == [4, 4, 4]


def test_references_that_are_gone_are_shown_as_missing(run):
    for epoch in (0, 1):
        (run / "samples" / f"epoch-00000{epoch}" / "001_reference_0.jpg").unlink()
    page = Page(render_report(run))
    assert page.words.count("missing") == 1
    assert len(page.images) == 6


def test_runs_that_edit_nothing_have_no_such_column(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    save_samples(tmp_path, 0, torch.zeros(1, 3, 4, 4), ["a"], {"ocr": [1.0]})
    (entry,) = read_samples(tmp_path)[0]
    assert entry["references"] == []
    assert "to edit" not in Page(render_report(tmp_path)).words


@pytest.mark.parametrize("names", ["../../x.jpg", 3, None, {"a": 1}])
def test_a_damaged_list_of_references_breaks_no_report(run, names):
    file = run / "samples" / "epoch-000000" / "scores.json"
    entries = json.loads(file.read_text())
    entries[0]["references"] = names
    file.write_text(json.dumps(entries))
    assert read_samples(run)[0][0]["references"] == []
    assert len(Page(render_report(run)).images) == 5


def test_a_reference_outside_the_folder_is_not_read(run):
    file = run / "samples" / "epoch-000000" / "scores.json"
    entries = json.loads(file.read_text())
    entries[0]["references"] = ["../../../x.jpg"]
    file.write_text(json.dumps(entries))
    assert read_samples(run)[0][0]["references"] == [file.parent / "x.jpg"]


def test_references_that_do_not_match_are_refused(tmp_path):
    with pytest.raises(ValueError, match="references has 1 entries for 2 images"):
        save_samples(tmp_path, 0, torch.zeros(2, 3, 4, 4), ["a", "b"], {}, REFERENCES[:1])


def test_trackers_are_shown_the_first_reference_left_of_the_image():
    images = torch.stack([plain(4, 6, 0.2, 0.2, 0.2), plain(4, 6, 0.6, 0.6, 0.6)])
    shown = beside(REFERENCES, images)
    assert shown.shape == (2, 3, 4, 12)
    assert torch.equal(shown[..., 6:], images)
    assert torch.equal(shown[0, :, :, :6], plain(4, 6, 1.0, 0.0, 0.0))
    assert torch.equal(shown[1, :, :, :6], plain(4, 6, 0.0, 1.0, 0.0))
