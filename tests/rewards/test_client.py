"""The client survives whatever a reward does; every fake runs in a real thread or process."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from flow_grpo.rewards import _pool, _runners
from flow_grpo.rewards.base import Samples, State
from flow_grpo.rewards.client import RewardClient

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).parent / "fakes"
LIMIT_S = 1.0


@pytest.fixture(autouse=True, scope="module")
def _fakes():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKES))
        yield


def samples(*prompts):
    """Return samples whose image i has the mean 0.1 * i."""
    means = torch.arange(len(prompts), dtype=torch.float32) / 10
    images = means[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    return Samples(images, list(prompts), [{} for _ in prompts])


def client(*classes, num_workers=1, timeout_s=LIMIT_S):
    weights = {f"misbehaving:{name}": 1.0 for name in classes}
    return RewardClient(weights, timeout_s=timeout_s, num_workers=num_workers)


def scored(pending):
    """Return (values, states, reasons) of the one fake reward."""
    table = pending.result()
    return (column["misbehaving"] for column in table[:3])


@pytest.fixture(params=["Threaded", "Spawned", "Inlined"], scope="module")
def any_client(request):
    # A process needs its time to answer at all on a busy machine; nothing hangs in these tests.
    with client(request.param, timeout_s=60) as opened:
        yield opened


def test_a_good_reward_is_scored_wherever_it_runs(any_client):
    values, states, reasons = scored(any_client.submit(samples("a", "b", "c")))
    torch.testing.assert_close(values, torch.full((3,), 0.1))  # (0 + 0.1 + 0.2) / 3
    assert states.tolist() == [State.OK] * 3
    assert reasons == [""] * 3
    assert any_client.weights == {"misbehaving": 1.0}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", "RuntimeError: no such luck"),
        ("short", "returned values of shape (2,) for 3 samples"),
        ("list", "returned list, but a reward returns Scores"),
        ("malformed", "returned malformed Scores"),
    ],
)
def test_nonsense_fails_all_items_with_the_reason(any_client, word, reason):
    values, states, reasons = scored(any_client.submit(samples(word, "b", "c")))
    assert states.tolist() == [State.FAILED] * 3
    assert values.isnan().all()
    assert all(text.startswith(reason) for text in reasons)
    _, states, _ = scored(any_client.submit(samples("a", "b")))
    assert states.tolist() == [State.OK] * 2  # the next call is served


def test_a_value_that_is_not_finite_fails_its_item_alone(any_client):
    values, states, reasons = scored(any_client.submit(samples("nan", "b", "c", "d")))
    assert states.tolist() == [State.OK, State.FAILED, State.FAILED, State.OK]
    assert reasons == ["", "returned nan", "returned inf", ""]
    assert values.isnan().tolist() == [False, True, True, False]


def test_a_hanging_thread_is_left_behind_and_replaced():
    with client("Threaded") as opened:
        hanging, waiting = opened.submit(samples("hang")), opened.submit(samples("a"))
        _, states, reasons = scored(hanging)
        assert states.tolist() == [State.FAILED]
        assert reasons == ["gave no answer within 1 s"]
        _, states, _ = scored(waiting)
        assert states.tolist() == [State.OK]


def running(pid):
    """Say whether a process is there and no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_hanging_process_is_killed_and_replaced():
    with client("Spawned") as opened:
        (worker,) = opened._lanes["misbehaving"]._workers
        first = worker.runner.pid
        _, states, reasons = scored(opened.submit(samples("hang")))
        assert states.tolist() == [State.FAILED]
        assert reasons == ["gave no answer within 1 s"]
        assert not running(first)
        worker._timeout_s = 60  # a fresh process on a busy machine may take its time
        _, states, _ = scored(opened.submit(samples("a")))
        assert states.tolist() == [State.OK]
        second = worker.runner.pid
    assert second != first
    assert not running(second)


def test_a_process_that_dies_fails_its_call_and_is_replaced():
    with client("Whereabouts", timeout_s=60) as opened:
        values, *_ = scored(opened.submit(samples("a")))
        pid = opened._lanes["misbehaving"]._workers[0].runner.pid
        assert values.item() == pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        _, states, reasons = scored(opened.submit(samples("a")))
        assert states.tolist() == [State.FAILED]
        assert reasons == ["its process ended (exit code -9)"]
        values, *_ = scored(opened.submit(samples("a")))
        assert values.item() not in (pid, os.getpid())


def test_a_process_that_dies_in_the_middle_of_a_call_fails_it():
    with client("Spawned", timeout_s=60) as opened:
        _, states, reasons = scored(opened.submit(samples("die")))
        assert states.tolist() == [State.FAILED]
        assert reasons == ["its process ended (exit code -9)"]


def test_submit_returns_before_the_reward_ends():
    import misbehaving

    misbehaving.STARTED.clear()
    misbehaving.GATE.clear()
    with client("Gated", timeout_s=60) as opened:
        pending = opened.submit(samples("a"))
        assert misbehaving.STARTED.wait(30)  # it runs, and this thread runs beside it
        assert not pending.done()
        misbehaving.GATE.set()
        _, states, _ = scored(pending)
        assert states.tolist() == [State.OK]
        assert pending.done()
        assert pending.seconds == pending.seconds > 0


def test_samples_are_split_over_workers_and_joined_in_order():
    with client("PerSample", num_workers=2) as opened:
        table = opened.submit(samples("a", "skip", "c", "d", "e")).result()
    values, states = table.values["misbehaving"], table.states["misbehaving"]
    expected = torch.tensor([0.0, torch.nan, 0.2, 0.3, 0.4])
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert states.tolist() == [State.OK, State.NOT_APPLICABLE, *[State.OK] * 3]
    assert table.reasons["misbehaving"] == ["", "asked to skip", "", "", ""]
    assert table.details["misbehaving"]["twice"].tolist() == [2.0] * 5


def test_a_part_that_fails_leaves_the_other_parts_alone():
    with client("PerSample", num_workers=2) as opened:
        table = opened.submit(samples("a", "b", "c", "raise")).result()
    assert table.states["misbehaving"].tolist() == [State.OK] * 2 + [State.FAILED] * 2
    details = table.details["misbehaving"]["twice"]
    torch.testing.assert_close(
        details, torch.tensor([2.0, 2.0, torch.nan, torch.nan]), equal_nan=True
    )


def test_a_reason_is_logged_once(caplog):
    with client("Threaded") as opened, caplog.at_level(logging.WARNING):
        for word in ("raise", "raise", "short"):
            opened.submit(samples(word, "b")).result()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert texts[0] == "reward misbehaving failed for 2 of 2 samples: RuntimeError: no such luck"


def wait_until_busy(opened):
    """Wait until the one worker has taken a call."""
    (worker,) = opened._lanes["misbehaving"]._workers
    while worker.job is None:
        time.sleep(0.01)


def test_close_does_not_wait_for_a_reward_that_hangs(monkeypatch):
    monkeypatch.setattr("flow_grpo.rewards.client.GRACE_S", 0.2)
    opened = client("Threaded", timeout_s=3600)
    hanging, queued = opened.submit(samples("hang")), opened.submit(samples("a"))
    wait_until_busy(opened)
    opened.close()
    for pending in (hanging, queued):
        _, states, reasons = scored(pending)
        assert states.tolist() == [State.FAILED]
        assert reasons == [_pool.CLOSED]
    with pytest.raises(ValueError, match="closed; make a new one"):
        opened.submit(samples("a"))


def test_close_kills_a_process_in_a_call():
    opened = client("Spawned", timeout_s=3600)
    pid = opened._lanes["misbehaving"]._workers[0].runner.pid
    hanging = opened.submit(samples("hang"))
    wait_until_busy(opened)
    opened.close()
    _, states, reasons = scored(hanging)
    assert states.tolist() == [State.FAILED]
    assert reasons == [_pool.CLOSED]
    assert not running(pid)


EXIT = """
import sys, time, torch
sys.path.insert(0, {fakes!r})
from flow_grpo.rewards import client
from flow_grpo.rewards.base import Samples
client.GRACE_S = 0.2
opened = client.RewardClient({{{reward!r}: 1.0}}, timeout_s=3600, num_workers=1)
opened.submit(Samples(torch.zeros(1, 3, 8, 8), ["hang"], [{{}}]))
while opened._lanes["misbehaving"]._workers[0].job is None:
    time.sleep(0.01)
time.sleep(0.2)  # into the reward's own code
if {killed}:
    import os, signal
    print(opened._lanes["misbehaving"]._workers[0].runner.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
print("end of the script")
"""


@pytest.mark.parametrize("name", ["Threaded", "Spawned"])
def test_the_interpreter_exits_though_a_reward_hangs(name):
    code = EXIT.format(fakes=str(FAKES), reward=f"misbehaving:{name}", killed=False)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of the script\n", "")


def test_a_reward_process_ends_with_a_parent_that_is_killed():
    code = EXIT.format(fakes=str(FAKES), reward="misbehaving:Spawned", killed=True)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60
    )  # returns once the child has closed its copy of stdout, that is, is ending
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(int(done.stdout))


@pytest.mark.parametrize(
    ("name", "error"), [("Unbuildable", ImportError), ("UnbuildableSpawned", ValueError)]
)
def test_a_reward_that_cannot_be_built_is_an_error_at_once(name, error):
    with pytest.raises(error, match="needs a package: pip install a-package"):
        client(name)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"unknown reward 'orc'; .*did you mean 'ocr'\?"):
        RewardClient({"orc": 1.0})
    with pytest.raises(ValueError, match="no reward is named"):
        RewardClient({})
    with pytest.raises(ValueError, match="'ocr' is nan; it must be finite"):
        RewardClient({"ocr": float("nan")})
    with pytest.raises(ValueError, match=r"share the name \['misbehaving'\]"):
        client("Threaded", "Inlined")
    with pytest.raises(ValueError, match="runs = 'somewhere'; it must be one of"):
        client("Nowhere")
    with pytest.raises(ValueError, match="timeout_s"):
        client("Threaded", timeout_s=0)


def test_a_submission_needs_one_prompt_for_every_image():
    with client("Inlined") as opened, pytest.raises(ValueError, match="2 images, 1 prompts"):
        opened.submit(samples("a", "b")._replace(prompts=["a"]))


def test_some_of_the_rewards_can_be_asked():
    with RewardClient({"misbehaving:Inlined": 1.0, "jpeg_compressibility": 0.0}) as opened:
        table = opened.submit(samples("a"), names=("jpeg_compressibility",)).result()
        assert set(table.values) == {"jpeg_compressibility"}
        assert set(opened.submit(samples("a")).result().values) == set(opened.weights)


def test_tensors_in_any_place_survive_the_pipe():
    references = [torch.rand(3, 4, 4), None]
    sent = samples("a", "b")._replace(
        metadata=[{"box": torch.ones(4)}, {"size": (1, 2)}], reference_images=references
    )
    received = _runners._unpacked(_runners.pickle.loads(_runners._packed(sent)))
    torch.testing.assert_close(received.images, sent.images)
    torch.testing.assert_close(received.reference_images[0], references[0])
    torch.testing.assert_close(received.metadata[0]["box"], torch.ones(4))
    assert received.metadata[1] == {"size": (1, 2)}
    assert received.group_ids is received.reference_images[1] is None
