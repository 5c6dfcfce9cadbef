"""A set with images comes with exactly the images that its lines name, from a loopback server."""

import io
import json
import zipfile

import pytest
from test_fetch import assert_failed_and_left, fetch, run, server, tree

__all__ = ["fetch", "run", "server"]  # fixtures

IMAGES = {"pictures/a.jpg": b"picture a", "pictures/far/b.jpg": b"picture b" * 9999}
TRAIN = b'{"prompt": "x", "image": "pictures/a.jpg"}\n{"prompt": "y", "image": "pictures/a.jpg"}\n'
TEST = b'{"prompt": "z", "image": "pictures/far/b.jpg"}\n'
ZIP = "/dataset/edits/pictures.zip"


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return buffer.getvalue()


@pytest.fixture
def edits(fetch, server, monkeypatch, run):
    files = (
        fetch.File("train_metadata.jsonl", 2),
        fetch.File("test_metadata.jsonl", 1),
        fetch.File("pictures", None, url="https://elsewhere.example/pictures.zip"),
    )
    monkeypatch.setitem(fetch.SETS, "edits", files)
    server.bodies |= {
        "/dataset/edits/train_metadata.jsonl": TRAIN,
        "/dataset/edits/test_metadata.jsonl": TEST,
        ZIP: zipped(IMAGES),
    }
    return lambda *arguments: run(*arguments, names=("edits",))


def test_a_set_comes_with_the_images_that_its_lines_name_and_no_others(edits, server, tmp_path):
    others = {"pictures/c.jpg": b"unused", "__MACOSX/x": b"x", "../evil": b"x", "/abs": b"x"}
    server.bodies[ZIP] = zipped({**IMAGES, **others})
    code, out, error = edits()
    assert (code, error) == (0, "")
    assert "pictures (images)" in out
    files = tree(tmp_path)
    record = json.loads(files.pop("edits/SOURCE.json"))["files"]["pictures"]
    assert files == {
        "edits/train_metadata.jsonl": TRAIN,
        "edits/test_metadata.jsonl": TEST,
        **{f"edits/{name}": content for name, content in IMAGES.items()},
    }
    assert (record["images"], record["url"]) == (2, f"{server.url}{ZIP}")


def test_images_already_fetched_are_not_asked_for_again(edits, server):
    edits()
    server.requests.clear()
    assert edits()[0] == 0
    assert server.requests == []


def test_only_images_that_are_gone_are_fetched_again(edits, server, tmp_path):
    edits()
    before = tree(tmp_path)
    (tmp_path / "edits" / "pictures" / "a.jpg").unlink()
    server.requests.clear()
    code, _, error = edits()
    assert code == 1
    assert "pictures is there (a folder, or yours); --force" in error
    assert edits("--force")[0] == 0
    assert server.requests == [ZIP]
    after = tree(tmp_path)
    backups = [name for name in after if ".bak/" in name]
    assert [after.pop(name) for name in backups] == [IMAGES["pictures/far/b.jpg"]]
    before.pop("edits/SOURCE.json")
    after.pop("edits/SOURCE.json")
    assert after == before


def test_a_folder_of_the_users_is_kept_beside_even_twice(edits, server, tmp_path):
    mine = tmp_path / "edits" / "pictures" / "mine.jpg"
    for _ in range(2):
        mine.parent.mkdir(parents=True, exist_ok=True)
        for path in mine.parent.glob("*.jpg"):
            path.unlink()
        (mine.parent / "far" / "b.jpg").unlink(missing_ok=True)
        mine.write_bytes(b"mine")
        assert edits("--force")[0] == 0
        names = set(tree(tmp_path))
        (kept,) = {name for name in names if name.endswith("mine.jpg")}
        assert ".bak/" in kept
        assert {f"edits/{name}" for name in IMAGES} < names


def test_an_image_of_another_name_is_not_the_one_that_was_fetched(edits, tmp_path):
    edits()
    (tmp_path / "edits" / "pictures" / "a.jpg").rename(tmp_path / "edits" / "pictures" / "aa.jpg")
    assert edits()[0] == 1
    assert edits("--force")[0] == 0
    assert tree(tmp_path)["edits/pictures/a.jpg"] == IMAGES["pictures/a.jpg"]


def test_other_images_than_at_the_first_download_are_refused(edits, server, tmp_path):
    edits()
    server.bodies[ZIP] = zipped({**IMAGES, "pictures/a.jpg": b"picture A"})
    (tmp_path / "edits" / "pictures" / "a.jpg").unlink()
    assert_failed_and_left(edits("--force"), tmp_path, tree(tmp_path), "SOURCE.json says")


def test_an_archive_packed_anew_is_the_same_set(edits, server, tmp_path):
    edits()
    before = tree(tmp_path)
    for path in (tmp_path / "edits" / "pictures").glob("**/*.jpg"):
        path.unlink()
    names = ["pictures/far/b.jpg", "pictures/a.jpg"]
    server.bodies[ZIP] = zipped({name: IMAGES[name] for name in names})
    assert edits("--force")[0] == 0
    for name in names:
        assert tree(tmp_path)[f"edits/{name}"] == before[f"edits/{name}"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (zipped({"pictures/a.jpg": b"a"}), "1 images are not in it, e.g. pictures/far/b.jpg"),
        (b"<html>moved</html>", "is no zip that can be read"),
        (zipped(IMAGES)[:-40], "is no zip that can be read"),
    ],
)
def test_an_archive_that_lacks_images_or_is_broken_leaves_nothing(
    edits, server, tmp_path, body, complaint
):
    server.bodies[ZIP] = body
    assert_failed_and_left(edits(), tmp_path, {}, complaint)


@pytest.mark.parametrize("byte", [0, 4])  # a kind of block that there is not; a wrong sum
def test_a_damaged_member_is_refused(edits, server, tmp_path, byte):
    body = bytearray(zipped(IMAGES))
    place = body.index(b"pictures/a.jpg") + len("pictures/a.jpg")  # its data follow its name
    body[place + byte] ^= 0xFF if byte else 0x04
    server.bodies[ZIP] = bytes(body)
    assert_failed_and_left(edits(), tmp_path, {}, "is no zip that can be read")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "x"}', "names no image (KeyError('image'))"),
        (b"[]", "names no image"),
        (b"{", "names no image"),
        (b'{"image": 3}', "names no image"),
        (b'{"image": "../pictures/a.jpg"}', "is not below pictures/"),
        (b'{"image": "pictures/../../a.jpg"}', "is not below pictures/"),
        (b'{"image": "/pictures/a.jpg"}', "is not below pictures/"),
        (b'{"image": "pictures"}', "is not below pictures/"),
        (b'{"image": "pictures/..\\\\..\\\\a.jpg"}', "is not below pictures/"),
    ],
)
def test_a_line_without_an_image_below_the_folder_is_refused(
    edits, server, tmp_path, line, complaint
):
    server.bodies["/dataset/edits/test_metadata.jsonl"] = line
    assert_failed_and_left(edits(), tmp_path, {}, complaint)
    assert_failed_and_left(edits(), tmp_path, {}, "test_metadata.jsonl:1")


def test_images_that_unpack_to_too_much_are_refused(edits, fetch, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "MAX_IMAGES_BYTES", 80_000)  # the zip is smaller, b.jpg is not
    assert_failed_and_left(edits(), tmp_path, {}, "the images take more than")


def test_the_limit_of_a_text_file_does_not_hold_for_the_archive(edits, fetch, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 200)
    assert edits()[0] == 0


def test_an_archive_without_end_is_cut_off(edits, fetch, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "MAX_IMAGES_BYTES", 200)
    assert_failed_and_left(edits(), tmp_path, {}, "pictures.zip: more than 0 MiB")


def test_the_public_images_come_from_their_own_place_unless_a_mirror_is_named(fetch):
    images = fetch.SETS["counting_edit"][2]
    url = fetch.Server(fetch.BASE_URL, 1, 1).url("counting_edit", images)
    assert url.endswith("/jieliu/counting_edit/resolve/main/generated_images.zip")
    mirror = fetch.Server("http://m/", 1, 1).url("counting_edit", images)
    assert mirror == "http://m/dataset/counting_edit/generated_images.zip"
