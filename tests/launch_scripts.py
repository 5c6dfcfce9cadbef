"""The launch scripts, what each was published for, and how tests start them."""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OURS = ("CONFIG", "SCRIPT", "NUM_PROCESSES", "NUM_MACHINES", "MASTER_ADDR", "MASTER_PORT")
OURS += ("ACCELERATE_CONFIG", "FLOW_GRPO_NUM_PROCESSES", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class Published(NamedTuple):
    """What a script is for: machines, GPUs of each, train script, preset."""

    machines: int
    gpus: int
    train: str
    preset: str

    @property
    def start(self) -> list[str]:
        """Return the part of the command line from the train script on."""
        return [f"scripts/train_{self.train}.py", "--config", f"config/{self.preset}"]


SINGLE = {
    "grpo": (1, "sd3", "grpo.py:general_ocr_sd3_1gpu"),
    "dpo": (1, "sd3", "dpo.py:geneval_sd3"),
    "sft": (1, "sd3", "sft.py:geneval_sd3"),
    "grpo_flux": (8, "flux", "grpo.py:pickscore_flux_8gpu"),
    "grpo_qwenimage": (8, "qwenimage", "grpo.py:pickscore_qwenimage_8gpu"),
    "grpo_qwenimage_edit": (8, "qwenimage_edit", "grpo.py:counting_qwenimage_edit_8gpu"),
    "grpo_wan": (1, "wan2_1", "grpo.py:general_ocr_wan2_1"),
}
MULTI = {
    "sd3": (4, 8, "sd3", "grpo.py:geneval_sd3"),
    "sd3_fast": (4, 8, "sd3", "grpo.py:pickscore_sd3_fast_nocfg"),
    "sd3_fast/geneval": (4, 8, "sd3", "grpo.py:geneval_sd3_fast_nocfg"),
    "sd3_fast/pickscore": (4, 8, "sd3", "grpo.py:pickscore_sd3_fast_nocfg"),
    "sd3_grpo_guard": (2, 8, "sd3", "grpo_guard.py:general_ocr_sd3_rationorm"),
    "flux": (4, 8, "flux", "grpo.py:pickscore_flux"),
    "flux_fast": (4, 8, "flux", "grpo.py:pickscore_flux_fast"),
    "flux_kontext": (4, 7, "flux_kontext", "grpo.py:counting_flux_kontext"),
    "qwenimage": (4, 8, "qwenimage", "grpo.py:pickscore_qwenimage"),
    "qwenimage_edit": (4, 8, "qwenimage_edit", "grpo.py:counting_qwenimage_edit"),
}
SINGLE = {f"single_node/{name}.sh": Published(1, *rest) for name, rest in SINGLE.items()}
MULTI = {f"multi_node/{name}.sh": Published(*rest) for name, rest in MULTI.items()}
SCRIPTS = SINGLE | MULTI


def environment(path: Path | str, **settings: str) -> dict[str, str]:
    """Return this process's environment with `path` before PATH and only `settings` of ours."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**kept, "PATH": f"{path}:{os.environ['PATH']}", **settings}


def start(script: str, *arguments: str, path: Path | str, cwd: Path, **settings: str):
    """Start a script of scripts/ by its absolute path; its process collects stdout and stderr."""
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / script), *arguments], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(path, **settings),
    )  # fmt: skip


def run(script: str, *arguments: str, path: Path | str, cwd: Path, **settings: str):
    """Run a script of scripts/ to its end."""
    process = start(script, *arguments, path=path, cwd=cwd, **settings)
    return finished(process)


def finished(process) -> subprocess.CompletedProcess:
    """Wait for what `start` returned, and stop it after seven minutes."""
    try:
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
