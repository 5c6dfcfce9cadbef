"""Run one reward in a thread or in a process of its own, with a time limit that holds.

A runner answers `call` with Scores, or raises: RewardError (the reward raised; the runner lives on)
or RunnerLost (it hangs, died or never started; it must be replaced).
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch

from flow_grpo import registry
from flow_grpo.rewards.base import Reward, Samples, Scores

START_TIMEOUT_S = 600.0  # to import a reward and load its weights
_BUILDING = threading.Lock()  # several libraries cannot be imported by two threads at once


class RewardError(Exception):
    """What a reward raised, as text."""


class RunnerLost(Exception):
    """Why a runner is of no more use."""


class ThreadRunner:
    """Run a reward in a daemon thread; one that hangs is left behind."""

    def __init__(self, name: str, device: str):
        self._name, self._device = name, device
        self._requests, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"reward-{name}", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Block until the reward is built; raise what its constructor raised."""
        _, error = self._answer(START_TIMEOUT_S)
        if error is not None:
            raise error

    def call(self, samples: Samples, timeout_s: float) -> Scores:
        """Return the reward's own answer within timeout_s seconds."""
        self._requests.put(samples)
        scores, error = self._answer(timeout_s)
        if error is not None:
            raise RewardError(describe(error)) from error
        return scores

    def stop(self) -> None:
        """Let the thread end when it is next idle; return at once."""
        self._requests.put(None)

    kill = stop

    def _answer(self, timeout_s: float) -> tuple[Scores | None, Exception | None]:
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RunnerLost(f"gave no answer within {timeout_s:g} s") from None

    def _serve(self) -> None:
        with _BUILDING:
            reward, error = attempt(build, self._name, self._device)
        self._answers.put((None, error))
        if error is not None:
            return
        while (samples := self._requests.get()) is not None:
            self._answers.put(attempt(reward, samples))


class ProcessRunner:
    """Run a reward in a fresh Python process, spoken to over a pipe; one that hangs is killed.

    The process imports neither the caller's main module nor anything else but the reward. It ends
    with its parent, however that ends. It takes one OpenMP thread unless OMP_NUM_THREADS is set.
    """

    def __init__(self, name: str, device: str):
        self._pipe, child_end = Pipe()
        code = "from flow_grpo.rewards._runners import serve_pipe; serve_pipe()"
        arguments = [str(child_end.fileno()), str(os.getpid()), name, device]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[child_end.fileno()],
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
        )
        child_end.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Block until the reward is built; raise ValueError with what its constructor raised."""
        error = self._receive(time.monotonic() + START_TIMEOUT_S, START_TIMEOUT_S)
        if error is not None:
            raise ValueError(error)

    def call(self, samples: Samples, timeout_s: float) -> Scores:
        """Return the reward's own answer within timeout_s seconds."""
        deadline = time.monotonic() + timeout_s
        killer = threading.Timer(timeout_s, self._process.kill)  # sending can hang as well
        killer.daemon = True
        killer.start()
        try:
            self._pipe.send_bytes(_packed(samples))
        except OSError:
            raise self._lost(deadline, timeout_s) from None
        finally:
            killer.cancel()
        answer = self._receive(deadline, timeout_s)
        if isinstance(answer, str):
            raise RewardError(answer)
        return _unpacked(answer)

    def kill(self) -> None:
        """Kill the process, whatever it does; safe from any thread."""
        self._process.kill()

    def stop(self) -> None:
        """Kill the process and free its pipe."""
        self.kill()
        self._process.wait()
        self._pipe.close()

    def _receive(self, deadline: float, timeout_s: float):
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(self._pipe.recv_bytes())
        except (OSError, EOFError):
            pass
        raise self._lost(deadline, timeout_s)

    def _lost(self, deadline: float, timeout_s: float) -> RunnerLost:
        if time.monotonic() >= deadline:
            return RunnerLost(f"gave no answer within {timeout_s:g} s")
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "unknown"
        return RunnerLost(f"its process ended (exit code {code})")


RUNNERS = {"thread": ThreadRunner, "process": ProcessRunner}


def describe(error: Exception) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def build(name: str, device: str) -> Reward:
    """Construct a reward by name."""
    return registry.load("flow_grpo.rewards", name)(device=device)


def attempt(function: Callable, *arguments) -> tuple[object, Exception | None]:
    """Return (result, None) of a call without gradients, or (None, what it raised)."""
    try:
        with torch.no_grad():
            return function(*arguments), None
    except Exception as error:  # rewards are foreign code and may raise anything
        return None, error


def serve_pipe() -> None:
    """Serve one reward in a child process; arguments: pipe, parent's pid, reward, device."""
    handle, parent, name, device = sys.argv[-4:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    pipe = Connection(int(handle))
    reward, error = attempt(build, name, device)
    pipe.send_bytes(_packed(error and describe(error)))
    if error is not None:
        return
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        scores, error = attempt(reward, _unpacked(pickle.loads(request)))
        pipe.send_bytes(_packed(scores if error is None else describe(error)))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class _Array:
    """A tensor on its way through a pipe: torch's own pickling would pass open files around."""

    def __init__(self, tensor: torch.Tensor):
        self.values = tensor.detach().cpu().numpy()


def _packed(record) -> bytes:
    return pickle.dumps(_mapped(record, torch.Tensor, _Array))


def _unpacked(record):
    return _mapped(record, _Array, lambda array: torch.from_numpy(array.values))


def _mapped(value, kind: type, convert):
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, convert) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, kind, convert) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, kind, convert) for item in value)
    return value
