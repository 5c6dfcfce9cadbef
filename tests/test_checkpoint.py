"""A checkpoint is whole or not there, and the newest whole one is found."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flow_grpo import checkpoint

ROOT = Path(__file__).resolve().parents[1]


def publish(folder: Path, epoch: int, *, eval_total: float | None = None) -> Path:
    """Publish a small checkpoint."""

    def write(path):
        (path / "state").mkdir()
        save_file({"w": torch.full((64,), float(epoch))}, path / "state" / "w.safetensors")
        (path / "note.txt").write_text(f"epoch {epoch}")

    return checkpoint.publish(folder, epoch, write, {"epoch": epoch, "eval_total": eval_total})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_by_number_is_found(tmp_path):
    for epoch in (2, 10, 9):  # as text, 9 would be the newest
        publish(tmp_path, epoch)
    path, manifest = checkpoint.newest(tmp_path)
    assert path.name == "checkpoint-10"
    assert manifest["epoch"] == 10
    assert [p.name for p in checkpoint.listed(tmp_path)] == [
        f"checkpoint-{epoch}" for epoch in (2, 9, 10)
    ]


def test_there_is_no_newest_where_nothing_was_saved(tmp_path):
    assert checkpoint.newest(tmp_path / "absent") is None
    assert checkpoint.newest(tmp_path) is None


def truncated(path: Path) -> None:
    os.truncate(path / "state" / "w.safetensors", 40)


def flipped(path: Path) -> None:
    data = bytearray((path / "state" / "w.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "state" / "w.safetensors").write_bytes(data)


FAULTS = {
    truncated: "state/w.safetensors differs from what was written",
    flipped: "state/w.safetensors differs from what was written",
    lambda path: (path / "note.txt").unlink(): "note.txt is missing",
    lambda path: (path / "manifest.json").unlink(): "no readable manifest.json",
    lambda path: (path / "manifest.json").write_text('{"epoch": 3,'): "no readable manifest.json",
    lambda path: (path / "manifest.json").write_text("null"): "no readable manifest.json",
    lambda path: (path / "manifest.json").write_text("{}"): "no readable manifest.json",
}


@pytest.mark.parametrize(("damage", "reason"), FAULTS.items())
def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_is_named(
    tmp_path, caplog, damage, reason
):
    publish(tmp_path, 2)
    damage(publish(tmp_path, 3))
    path, _ = checkpoint.newest(tmp_path)
    assert path.name == "checkpoint-2"
    assert "checkpoint-3 is not usable" in caplog.text
    assert reason in caplog.text


def test_a_damaged_checkpoint_is_replaced_when_its_epoch_comes_again(tmp_path):
    flipped(publish(tmp_path, 3))
    publish(tmp_path, 3)
    assert checkpoint.fault(tmp_path / "checkpoint-3") is None


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
import test_checkpoint
from flow_grpo import checkpoint

folder, instant = Path(sys.argv[1]), sys.argv[2]
test_checkpoint.publish(folder, 1)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write(path):
    (path / "half.txt").write_text("half")
    if instant == "write":
        die()

if instant != "write":
    setattr(checkpoint if instant == "_sync" else os, instant, die)
checkpoint.publish(folder, 2, write, {"epoch": 2})
"""


@pytest.mark.parametrize("instant", ["write", "_sync", "rename"])
def test_a_kill_while_writing_leaves_the_one_before(tmp_path, instant):
    command = [sys.executable, "-c", KILLED, str(tmp_path), instant]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert names(tmp_path) == [".writing-2", "checkpoint-1"]
    path, _ = checkpoint.newest(tmp_path)
    assert path.name == "checkpoint-1"
    publish(tmp_path, 5)  # whichever comes next clears what was left
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-5"]


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path, monkeypatch):
    events, rename, sync = [], os.rename, checkpoint._sync
    monkeypatch.setattr(os, "rename", lambda *a: (events.append("rename"), rename(*a)))
    monkeypatch.setattr(checkpoint, "_sync", lambda p: (events.append(p.name), sync(p)))
    publish(tmp_path, 1)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert set(before) == {"w.safetensors", "note.txt", "manifest.json", "state", ".writing-1"}
    assert after == [tmp_path.name]


def test_a_full_disk_while_saving_loses_nothing(tmp_path, monkeypatch):
    publish(tmp_path, 1)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"cannot save .*checkpoint-2 .*No space left on device"):
        checkpoint.publish(tmp_path, 2, full, {"epoch": 2})
    assert names(tmp_path) == ["checkpoint-1"]
    assert checkpoint.fault(tmp_path / "checkpoint-1") is None


def test_a_limit_inside_the_tensor_library_is_an_os_error_too(tmp_path):
    publish(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(path):
        save_file({"w": torch.zeros(100_000)}, path / "w.safetensors")

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot save .*checkpoint-2 .*File too large"):
            checkpoint.publish(tmp_path, 2, write, {"epoch": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in place of the folder")
    with pytest.raises(OSError, match="cannot save"):
        publish(tmp_path / "checkpoints", 1)
    assert (tmp_path / "checkpoints").read_text() == "a file in place of the folder"


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for epoch, total in enumerate((0.1, 0.9, 0.3, None, 0.5), start=1):
        publish(tmp_path, epoch, eval_total=total)
    deleted = checkpoint.prune(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert [path.name for path in deleted] == ["checkpoint-1", "checkpoint-3"]
    publish(tmp_path, 6, eval_total=0.95)
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-6"]


def test_without_evaluations_only_the_last_ones_are_kept(tmp_path):
    for epoch in (1, 2, 3):
        publish(tmp_path, epoch)
    (tmp_path / "checkpoint-1" / "manifest.json").write_text("{")
    checkpoint.prune(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_what_is_later_than_the_resumed_epoch_is_set_aside_and_cannot_win_again(tmp_path):
    for epoch in (20, 30, 40):
        publish(tmp_path, epoch, eval_total=1.0 / epoch)
    checkpoint.set_aside(tmp_path, 20)
    assert names(tmp_path) == ["checkpoint-20", "left-checkpoint-30", "left-checkpoint-40"]
    publish(tmp_path, 25)
    assert checkpoint.prune(tmp_path, 1) == []  # the newest and the best
    assert checkpoint.newest(tmp_path)[0].name == "checkpoint-25"


def states() -> dict[str, dict[str, torch.Tensor]]:
    """Return random tensors of two parameters, of their average, and of an optimizer."""
    source = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 2), "b": (3, 2)}
    kinds = {
        kind: {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
        for kind in ("parameters", "ema")
    }
    return kinds | {"optimizer": {"0.step": torch.tensor(3.0), "0.exp_avg": torch.ones(3, 2)}}


SHAPES = {"a": torch.Size((3, 2)), "b": torch.Size((3, 2))}


def test_state_comes_back_bit_for_bit(tmp_path):
    written, scaler = states(), {"scale": 1024.0}
    checkpoint.save_state(tmp_path / "state", written, scaler)
    read = checkpoint.load_state(tmp_path / "state", SHAPES, ("parameters", "ema"))
    assert read[1] == scaler
    assert read[0].keys() == written.keys()
    for kind, named in written.items():
        assert read[0][kind].keys() == named.keys()
        assert all(torch.equal(read[0][kind][name], named[name]) for name in named)


def test_state_of_other_parameters_is_refused(tmp_path):
    checkpoint.save_state(tmp_path / "state", states(), None)
    shapes = {"a": SHAPES["a"], "c": SHAPES["b"]}
    with pytest.raises(ValueError, match=r"holds other parameters than this run trains, such as b"):
        checkpoint.load_state(tmp_path / "state", shapes, ("parameters",))


def test_state_of_another_shape_is_refused(tmp_path):
    checkpoint.save_state(tmp_path / "state", states(), None)
    with pytest.raises(ValueError, match=r"a has shape \(3, 2\), but this run trains \(4, 2\)"):
        checkpoint.load_state(tmp_path / "state", SHAPES | {"a": torch.Size((4, 2))}, ("ema",))


def test_state_without_what_the_run_needs_is_refused(tmp_path):
    checkpoint.save_state(tmp_path / "state", states(), None)
    with pytest.raises(ValueError, match=r"old\.safetensors is missing.*another algorithm"):
        checkpoint.load_state(tmp_path / "state", SHAPES, ("parameters", "old"))


def test_no_file_is_a_pickle(tmp_path):
    checkpoint.save_state(tmp_path / "state", states(), {"scale": 2.0})
    assert {path.suffix for path in (tmp_path / "state").iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "state" / "scaler.json").read_text()) == {"scale": 2.0}
