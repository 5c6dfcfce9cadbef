"""Bring the public prompt sets to this folder, by name.

    python dataset/fetch.py --list
    python dataset/fetch.py ocr --force        --force: over the small set that lies there
    FLOW_GRPO_DATA_URL=https://mirror.example python dataset/fetch.py geneval

A set is published whole: its files are downloaded aside, checked (length, rows, checksum) and only
then renamed into place. The checksum is written to SOURCE.json at the first download and compared
at every later one. Images come as a zip, of which the files that the set's lines name are kept.
Standard library only.
"""

import argparse
import datetime
import difflib
import hashlib
import http.client
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
COMMIT = "9745241cf1101407e9b518dd4f10498092150522"
BASE_URL = f"https://raw.githubusercontent.com/yifan123/flow_grpo/{COMMIT}"
IMAGES_URL = "https://huggingface.co/datasets/jieliu/counting_edit/resolve/main"
ATTEMPTS = 3
MAX_BYTES = 256 * 2**20
MAX_IMAGES_BYTES = 4 * 2**30  # of a zip, and of what is taken out of it
MAX_SECONDS = 900.0  # of one attempt


class File(NamedTuple):
    name: str
    rows: int | None  # lines, checked; None: a folder, of the images that the other files name
    sha256: str | None = None  # None: recorded at the first download
    url: str = ""  # of a folder's zip, unless a mirror is named


SETS = {
    "ocr": (File("train.txt", 19_653), File("test.txt", 1_018)),
    "geneval": (File("train_metadata.jsonl", 50_000), File("test_metadata.jsonl", 2_212)),
    "geneval_unseen_objects": (File("test_metadata.jsonl", 1_024),),
    "pickscore": (File("train.txt", 25_432), File("test.txt", 2_048)),
    "pickscore_sfw": (File("train.txt", 15_486), File("test.txt", 1_024)),
    "drawbench": (File("train.txt", 1), File("test.txt", 1_000)),
    "counting_edit": (
        File("train_metadata.jsonl", 818),
        File("test_metadata.jsonl", 112),
        File("generated_images", None, url=f"{IMAGES_URL}/generated_images.zip"),
    ),
}


class FetchError(Exception):
    """What went wrong with a set, in one line; nothing of the set has been replaced."""


class RetriableError(Exception):
    """A failure of the connection, worth another attempt."""


class Server(NamedTuple):
    base_url: str
    timeout_s: float  # without a byte
    pause_s: float  # before the second attempt; doubles

    def url(self, name: str, file: File) -> str:
        if file.url and self.base_url == BASE_URL:
            return file.url
        zipped = ".zip" if file.rows is None else ""
        return f"{self.base_url.rstrip('/')}/dataset/{name}/{file.name}{zipped}"


def fetch(name: str, root: Path, server: Server, *, force: bool = False) -> str:
    """Bring one set into `root`/`name` and return what was done, in a line.

    A file that is there already is replaced by force only, and kept as FILE.<sha256[:8]>.bak.
    Raises FetchError.
    """
    folder = root / name
    source = _read_source(folder)
    missing = [file for file in SETS[name] if not _is_fetched(folder / file.name, source)]
    if not missing:
        return f"{name}: fetched before and unchanged, {_rows_of(SETS[name])}"
    for file in missing:
        path = folder / file.name
        if path.exists() and not force:
            rows = "a folder" if path.is_dir() else f"{_count_rows(path)} rows: the small set"
            raise FetchError(
                f"{path} is there ({rows}, or yours); "
                "--force replaces it and keeps it beside as .bak"
            )
    aside = folder if folder.is_dir() else root
    with tempfile.TemporaryDirectory(dir=aside, prefix=".fetch-") as temporary:
        fetched = {}
        for file in missing:
            path, url = Path(temporary) / file.name, server.url(name, file)
            if file.rows is None:
                archive = Path(temporary) / "images.zip"
                _download(url, archive, server, MAX_IMAGES_BYTES)
                texts = [other.name for other in SETS[name] if other.rows is not None]
                wanted = _named_images(file.name, texts, Path(temporary), folder)
                _unpack(archive, wanted, Path(temporary), url)
                sha256 = _sha256(path)
            else:
                sha256 = _download(url, path, server, MAX_BYTES)
            fetched[file.name] = _verified(file, path, sha256, source, url)
        record = {"set": name, "files": {**source.get("files", {}), **fetched}}
        _publish(Path(temporary), folder, fetched, record)
    return f"{name}: fetched {_rows_of(missing)} into {folder}"


def _rows_of(files) -> str:
    return ", ".join(
        f"{file.name} ({'images' if file.rows is None else f'{file.rows} rows'})" for file in files
    )


def _named_images(images: str, texts: list[str], temporary: Path, folder: Path) -> list[str]:
    """Return the files below `images` that a set's lines name, those just fetched or there."""
    names: dict[str, None] = {}
    for text in texts:
        path = temporary / text if (temporary / text).exists() else folder / text
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                name = json.loads(line)["image"]
                parts = PurePosixPath(name).parts
            except (ValueError, KeyError, TypeError) as error:
                raise FetchError(f"{text}:{number} names no image ({error!r})") from error
            if len(parts) < 2 or parts[0] != images or ".." in parts or "\\" in name:
                raise FetchError(f"{text}:{number}: image {name!r} is not below {images}/")
            names[name] = None
    return list(names)


def _unpack(archive: Path, wanted: list[str], folder: Path, url: str) -> None:
    """Take the wanted files out of a zip, and nothing else."""
    try:
        with zipfile.ZipFile(archive) as packed:
            there = {entry.filename: entry for entry in packed.infolist()}
            lacking = [name for name in wanted if name not in there]
            if lacking:
                raise FetchError(f"{url}: {len(lacking)} images are not in it, e.g. {lacking[0]}")
            if sum(there[name].file_size for name in wanted) > MAX_IMAGES_BYTES:
                raise FetchError(f"{url}: the images take more than {MAX_IMAGES_BYTES >> 30} GiB")
            for name in wanted:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with packed.open(there[name]) as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise FetchError(f"{url} is no zip that can be read: {error}") from error


def _download(url: str, path: Path, server: Server, max_bytes: int) -> str:
    """Stream `url` to `path`, in at most ATTEMPTS attempts; return the sha256."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _download_once(url, path, server.timeout_s, max_bytes)
        except RetriableError as error:
            if attempt == ATTEMPTS:
                raise FetchError(f"{url}: {error} ({ATTEMPTS} attempts)") from error
        time.sleep(server.pause_s * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _download_once(url: str, path: Path, timeout_s: float, max_bytes: int) -> str:
    request = urllib.request.Request(url, headers={"User-Agent": "flow-grpo-fetch"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return _stream(response, path, url, max_bytes)
    except urllib.error.HTTPError as error:
        if error.code == 429 or error.code >= 500:
            raise RetriableError(f"HTTP {error.code} {error.reason}") from error
        raise FetchError(f"{url}: HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise RetriableError(f"no connection: {error.reason}") from error
    except TimeoutError as error:
        raise RetriableError(f"no byte came for {timeout_s:g} s") from error
    except (ConnectionError, http.client.HTTPException) as error:
        raise RetriableError(f"connection broken: {error or type(error).__name__}") from error


def _stream(response: http.client.HTTPResponse, path: Path, url: str, max_bytes: int) -> str:
    """Write the body to `path`, on disk when this returns; return its sha256."""
    length = response.headers.get("Content-Length")
    digest, size, start = hashlib.sha256(), 0, time.monotonic()
    with path.open("wb") as file:
        while chunk := response.read1(1 << 16):
            size += len(chunk)
            if size > max_bytes:
                raise FetchError(f"{url}: more than {max_bytes >> 20} MiB; not a prompt set")
            if time.monotonic() - start > MAX_SECONDS:
                raise RetriableError(f"not finished after {MAX_SECONDS:g} s")
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if length is not None and size != int(length):
        raise RetriableError(f"the body ended after {size} of {length} bytes")
    return digest.hexdigest()


def _verified(file: File, path: Path, sha256: str, source: dict, url: str) -> dict:
    """Check a downloaded file against the table and SOURCE.json; return its record."""
    recorded = source.get("files", {}).get(file.name, {}).get("sha256")
    for expected, origin in ((file.sha256, "dataset/fetch.py"), (recorded, "SOURCE.json")):
        if expected is not None and sha256 != expected:
            raise FetchError(f"{url}: sha256 is {sha256}, {origin} says {expected}")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = {"url": url, "sha256": sha256, "fetched": now}
    if file.rows is None:
        return {**record, "images": len(_files(path))}
    rows = _count_rows(path)
    if rows != file.rows:
        raise FetchError(f"{url}: {rows} rows, expected {file.rows}")
    return {**record, "bytes": path.stat().st_size, "rows": rows}


def _publish(temporary: Path, folder: Path, fetched: dict, record: dict) -> None:
    """Rename the checked files into `folder`, and SOURCE.json last."""
    (temporary / "SOURCE.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    folder.mkdir(exist_ok=True)
    for name, entry in fetched.items():
        path = folder / name
        if path.exists():
            sha256 = _sha256(path)
            backup = folder / f"{name}.{sha256[:8]}.bak"
            if path.is_dir():  # no folder is renamed over another
                os.replace(path, temporary / f"{name}.old" if backup.exists() else backup)
            elif sha256 != entry["sha256"]:
                shutil.copyfile(path, temporary / f"{name}.bak")
                os.replace(temporary / f"{name}.bak", backup)
        os.replace(temporary / name, path)
    os.replace(temporary / "SOURCE.json", folder / "SOURCE.json")


def _read_source(folder: Path) -> dict:
    path = folder / "SOURCE.json"
    if not path.exists():
        return {}
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(entry["sha256"], str) for entry in source["files"].values()):
            return source
        reason = "a sha256 is no text"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = repr(error)
    raise FetchError(f"{path} is damaged ({reason}); delete it to fetch anew")


def _is_fetched(path: Path, source: dict) -> bool:
    recorded = source.get("files", {}).get(path.name, {}).get("sha256")
    return recorded is not None and path.exists() and _sha256(path) == recorded


def _sha256(path: Path) -> str:
    """Return the checksum of a file, or of the names and contents of a folder's files."""
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [f"{_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in _files(path)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _count_rows(path: Path) -> int:
    """Count lines; the last needs no newline."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.list:
        sys.stdout.write("".join(f"{name}: {_rows_of(files)}\n" for name, files in SETS.items()))
        return 0
    server = Server(options.base_url, options.timeout_s, options.pause_s)
    try:
        for name in options.names:
            if name == "pickscore":
                sys.stderr.write("pickscore holds unsafe prompts; pickscore_sfw is filtered\n")
            sys.stdout.write(fetch(name, options.root, server, force=options.force) + "\n")
    except (FetchError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the set in hand is as it was\n")
        return 130
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bring the public prompt sets to dataset/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETS))
    parser.add_argument("--list", action="store_true", help="print the sets and their rows")
    parser.add_argument("--force", action="store_true", help="replace files, kept as .bak")
    parser.add_argument(
        "--base_url",
        default=os.environ.get("FLOW_GRPO_DATA_URL") or BASE_URL,
        help="mirror that serves dataset/NAME/FILE (default: $FLOW_GRPO_DATA_URL or the sources)",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="where the sets go (this folder)")
    parser.add_argument("--timeout_s", type=float, default=30.0, help="seconds without a byte")
    parser.add_argument("--pause_s", type=float, default=1.0, help="before the second attempt")
    options = parser.parse_args(arguments)
    if not options.names and not options.list:
        parser.error(f"name a set: {', '.join(SETS)}")
    for name in options.names:
        if name not in SETS:
            nearest = difflib.get_close_matches(name, SETS, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            parser.error(f"no public set {name!r}; there are {', '.join(SETS)}{hint}")
    return options


if __name__ == "__main__":
    sys.exit(main())
