import hashlib
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

FETCH = Path(__file__).resolve().parents[1] / "dataset" / "fetch.py"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serve `bodies` {path: bytes}; a fault (handler, body) returns True if it answered."""

    def do_GET(self):
        self.server.requests.append(self.path)
        body = self.server.bodies.get(self.path)
        fault = self.server.faults.get(self.path)
        if fault is not None and fault(self, body):
            return
        if body is None:
            self.send_error(404)
            return
        self.reply(body, len(body))

    def reply(self, body, length):
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.release = threading.Event()  # ends the handlers that hang
    server.requests, server.faults = [], {}
    server.bodies = {
        "/dataset/tiny/train.txt": TRAIN,
        "/dataset/tiny/test.txt": TEST,
    }
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


TRAIN, TEST = b"a cat\na dog\na cow\n", b"an owl\na fox"  # the last line may lack its newline


@pytest.fixture
def fetch(monkeypatch):
    spec = importlib.util.spec_from_file_location("dataset_fetch", FETCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = (module.File("train.txt", 3), module.File("test.txt", 2))
    monkeypatch.setitem(module.SETS, "tiny", tiny)
    return module


@pytest.fixture
def run(fetch, server, tmp_path, capsys):
    def run(*arguments, names=("tiny",), timeout_s="5"):
        code = fetch.main(
            [*names, "--root", str(tmp_path), "--base_url", server.url, "--pause_s", "0.01"]
            + ["--timeout_s", timeout_s, *arguments]
        )
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def sent(handler, chunk):
    try:
        handler.wfile.write(chunk)
    except OSError:  # the client has gone
        return False
    return True


def tree(root):
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def assert_failed_and_left(result, root, before, complaint):
    code, out, error = result
    assert code == 1
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error
    assert tree(root) == before
    assert not [path for path in root.rglob("*") if path.name.startswith(".fetch-")]


def test_a_set_is_brought_whole_with_its_source_recorded(run, server, tmp_path):
    code, out, error = run()
    assert (code, error) == (0, "")
    assert "train.txt (3 rows)" in out
    files = tree(tmp_path)
    record = json.loads(files.pop("tiny/SOURCE.json"))
    assert files == {"tiny/train.txt": TRAIN, "tiny/test.txt": TEST}
    assert record["files"]["test.txt"]["sha256"] == hashlib.sha256(TEST).hexdigest()
    assert record["files"]["test.txt"]["rows"] == 2
    assert record["files"]["test.txt"]["bytes"] == len(TEST)
    assert record["files"]["test.txt"]["url"] == f"{server.url}/dataset/tiny/test.txt"


def test_a_set_already_fetched_asks_the_server_for_nothing(run, server):
    run()
    server.requests.clear()
    code, out, _ = run()
    assert code == 0
    assert "fetched before and unchanged" in out
    assert server.requests == []


def test_only_the_file_that_is_gone_is_fetched_again(run, server, tmp_path):
    run()
    (tmp_path / "tiny" / "test.txt").unlink()
    before = json.loads((tmp_path / "tiny" / "SOURCE.json").read_text())
    server.requests.clear()
    assert run()[0] == 0
    assert server.requests == ["/dataset/tiny/test.txt"]
    after = json.loads((tmp_path / "tiny" / "SOURCE.json").read_text())
    assert after["files"]["train.txt"] == before["files"]["train.txt"]
    assert (tmp_path / "tiny" / "test.txt").read_bytes() == TEST


def test_a_small_set_is_replaced_by_force_only_and_kept_beside(run, server, tmp_path):
    small = tmp_path / "tiny" / "train.txt"
    small.parent.mkdir()
    small.write_bytes(b"mine\n")
    before = tree(tmp_path)
    assert_failed_and_left(run(), tmp_path, before, "--force")
    assert server.requests == []
    assert run("--force")[0] == 0
    assert small.read_bytes() == TRAIN
    backup = f"train.txt.{hashlib.sha256(b'mine' + bytes([10])).hexdigest()[:8]}.bak"
    assert (tmp_path / "tiny" / backup).read_bytes() == b"mine\n"


def test_a_fetched_file_edited_later_is_not_overwritten_unasked(run, tmp_path):
    run()
    (tmp_path / "tiny" / "test.txt").write_bytes(b"edited\n")
    before = tree(tmp_path)
    assert_failed_and_left(run(), tmp_path, before, "--force")


def test_a_checksum_unlike_the_table_is_refused(run, fetch, monkeypatch, tmp_path):
    tiny = (fetch.File("train.txt", 3, "0" * 64), fetch.File("test.txt", 2))
    monkeypatch.setitem(fetch.SETS, "tiny", tiny)
    assert_failed_and_left(run(), tmp_path, {}, "dataset/fetch.py says 000")
    good = hashlib.sha256(TRAIN).hexdigest()
    monkeypatch.setitem(fetch.SETS, "tiny", (fetch.File("train.txt", 3, good),))
    assert run()[0] == 0


def test_a_checksum_unlike_the_first_download_is_refused(run, server, tmp_path):
    run()
    (tmp_path / "tiny" / "train.txt").unlink()
    server.bodies["/dataset/tiny/train.txt"] = TRAIN.replace(b"cat", b"rat")
    before = tree(tmp_path)
    assert_failed_and_left(run("--force"), tmp_path, before, "SOURCE.json says")


@pytest.mark.parametrize("body", [TRAIN + b"one more\n", b"a cat\n", b"<html>moved</html>"])
def test_a_wrong_number_of_rows_is_refused(run, server, tmp_path, body):
    server.bodies["/dataset/tiny/train.txt"] = body
    assert_failed_and_left(run(), tmp_path, {}, "rows, expected 3")


def test_one_bad_file_keeps_the_good_one_out_too(run, server, tmp_path):
    for name in ("train.txt", "test.txt"):
        (tmp_path / "tiny").mkdir(exist_ok=True)
        (tmp_path / "tiny" / name).write_bytes(b"mine\n")
    before = tree(tmp_path)
    server.bodies["/dataset/tiny/test.txt"] = b"short\n"  # the second of the two
    assert_failed_and_left(run("--force"), tmp_path, before, "1 rows, expected 2")


def test_a_file_that_does_not_exist_is_asked_for_once(run, server, tmp_path):
    del server.bodies["/dataset/tiny/train.txt"]
    assert_failed_and_left(run(), tmp_path, {}, "HTTP 404")
    assert len(server.requests) == 1


def test_a_body_shorter_than_announced_is_refused(run, server, tmp_path):
    def truncated(handler, body):
        handler.reply(body[: len(b"a cat\na dog\na ")], len(body))  # three rows, yet cut
        return True

    server.faults["/dataset/tiny/train.txt"] = truncated
    assert_failed_and_left(run(), tmp_path, {}, "train.txt: ")
    assert len(server.requests) == 3


def test_a_server_that_hangs_is_given_up_in_bounded_time(run, server, tmp_path):
    def hang(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:4])
        handler.wfile.flush()
        return server.release.wait(8)

    server.faults["/dataset/tiny/train.txt"] = hang
    start = time.monotonic()
    assert_failed_and_left(run(timeout_s="0.2"), tmp_path, {}, "no byte came for 0.2 s")
    assert time.monotonic() - start < 5
    assert len(server.requests) == 3


def test_a_server_that_never_answers_is_given_up_in_bounded_time(run, server, tmp_path):
    server.faults["/dataset/tiny/train.txt"] = lambda handler, body: server.release.wait(8)
    start = time.monotonic()
    assert_failed_and_left(run(timeout_s="0.2"), tmp_path, {}, "(3 attempts)")
    assert time.monotonic() - start < 5


def test_a_drip_is_given_up_in_bounded_time(run, fetch, server, monkeypatch, tmp_path):
    def drip(handler, body):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):  # 2 s
            if server.release.wait(0.02) or not sent(handler, b"a\n"):
                break
        return True

    monkeypatch.setattr(fetch, "MAX_SECONDS", 0.2)
    server.faults["/dataset/tiny/train.txt"] = drip
    assert_failed_and_left(run(), tmp_path, {}, "not finished after 0.2 s")


def test_a_body_without_end_is_cut_off(run, fetch, server, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "MAX_BYTES", 2**20)
    server.bodies["/dataset/tiny/train.txt"] = b"x" * (2**20 + 1)
    assert_failed_and_left(run(), tmp_path, {}, "more than 1 MiB")
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_fault_is_tried_again(run, server, tmp_path, status):
    answers = [status, status]

    def twice(handler, _):
        if answers:
            handler.send_error(answers.pop())
            return True
        return False

    server.faults["/dataset/tiny/train.txt"] = twice
    assert run()[0] == 0
    assert tree(tmp_path)["tiny/train.txt"] == TRAIN
    assert server.requests.count("/dataset/tiny/train.txt") == 3


def test_a_dropped_connection_is_tried_again_three_times(run, server, tmp_path):
    def drop(handler, _):
        handler.connection.close()
        return True

    server.faults["/dataset/tiny/train.txt"] = drop
    assert_failed_and_left(run(), tmp_path, {}, "(3 attempts)")
    assert len(server.requests) == 3


def test_no_server_is_one_line(run, server, tmp_path):
    result = run("--base_url", "http://127.0.0.1:9", timeout_s="1")  # discard port: refused
    assert_failed_and_left(result, tmp_path, {}, "no connection")


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"train.txt": {}}}'])
def test_a_damaged_record_is_one_line(run, tmp_path, text):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "SOURCE.json").write_text(text)
    before = tree(tmp_path)
    assert_failed_and_left(run(), tmp_path, before, "SOURCE.json is damaged")


def test_a_folder_that_cannot_be_written_is_one_line(run, tmp_path):
    (tmp_path / "tiny").write_text("a file where the folder should be")
    before = tree(tmp_path)
    assert_failed_and_left(run(), tmp_path, before, str(tmp_path / "tiny"))


def test_the_table_has_the_row_counts_of_the_public_sets(fetch, capsys):
    assert fetch.main(["--list"]) == 0
    listing = capsys.readouterr().out
    for line in (
        "ocr: train.txt (19653 rows), test.txt (1018 rows)",
        "geneval: train_metadata.jsonl (50000 rows), test_metadata.jsonl (2212 rows)",
        "geneval_unseen_objects: test_metadata.jsonl (1024 rows)",
        "pickscore: train.txt (25432 rows), test.txt (2048 rows)",
        "pickscore_sfw: train.txt (15486 rows), test.txt (1024 rows)",
        "drawbench: train.txt (1 rows), test.txt (1000 rows)",
        "counting_edit: train_metadata.jsonl (818 rows), test_metadata.jsonl (112 rows), "
        "generated_images (images)",
    ):
        assert f"{line}\n" in listing


def test_the_source_is_one_pinned_commit(fetch):
    assert len(fetch.COMMIT) == 40
    url = fetch.Server(fetch.BASE_URL, 1, 1).url("ocr", fetch.SETS["ocr"][1])
    assert url.endswith(f"/yifan123/flow_grpo/{fetch.COMMIT}/dataset/ocr/test.txt")


def test_choosing_pickscore_names_the_filtered_set(run, server):
    code, _, error = run(names=("pickscore",))
    assert code == 1  # this server has no such set
    assert "pickscore_sfw" in error.splitlines()[0]


def test_the_command_takes_its_server_from_the_environment(server, tmp_path):
    server.bodies["/dataset/drawbench/train.txt"] = b"a cat\n"
    server.bodies["/dataset/drawbench/test.txt"] = b"a dog\n" * 1000
    command = [sys.executable, str(FETCH), "drawbench", "--root", str(tmp_path)]
    environment = {**os.environ, "FLOW_GRPO_DATA_URL": server.url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path)["drawbench/test.txt"] == b"a dog\n" * 1000
    for arguments, complaint in ((["ocrr"], "did you mean ocr?"), ([], "name a set")):
        done = subprocess.run(
            [sys.executable, str(FETCH), *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr
