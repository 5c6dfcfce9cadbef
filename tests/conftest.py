"""Fixtures: tiny pipelines saved once a session, configurations that use them, runs."""

import functools
import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

# Before torch is imported: sums are only bit-equal at one number of threads, and processes that
# tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory) -> str:
    """Save a random SD3 without T5 and return its folder."""
    import tiny_models

    folder = tmp_path_factory.mktemp("tiny_sd3")
    tiny_models.sd3().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_sd3_t5_dir(tiny_dir) -> str:
    """Save a random SD3 with T5 and return its folder."""
    return tiny_dir("sd3")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """Return the function (family) -> folder of its random pipeline, saved once."""
    import families

    @functools.cache
    def saved(name: str) -> str:
        folder = tmp_path_factory.mktemp(f"tiny_{name}")
        families.FAMILIES[name].pipeline().save_pretrained(folder)
        return str(folder)

    return saved


@pytest.fixture(scope="session")
def tiny_flux_dir(tiny_dir) -> str:
    """Save a random FLUX.1 and return its folder."""
    return tiny_dir("flux")


@pytest.fixture(scope="session")
def tiny_qwenimage_dir(tiny_dir) -> str:
    """Save a random Qwen-Image and return its folder."""
    return tiny_dir("qwenimage")


@pytest.fixture(scope="session")
def tiny_flux_kontext_dir(tiny_dir) -> str:
    """Save a random FLUX.1-Kontext and return its folder."""
    return tiny_dir("flux_kontext")


@pytest.fixture(scope="session")
def tiny_clip_dir(tmp_path_factory) -> str:
    """Save a random CLIP with its processor and return its folder."""
    import tiny_models

    folder = tmp_path_factory.mktemp("tiny_clip")
    for part in tiny_models.clip():
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def edit_set(tmp_path_factory) -> Path:
    """Return a prompt set for editing: 6 prompts a split, 3 images of 3 shapes in each."""
    import tiny_flux

    folder = tmp_path_factory.mktemp("edit_set")
    tiny_flux.write_edit_set(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_wan_dir(tiny_dir) -> str:
    """Save a random Wan 2.1 and return its folder."""
    return tiny_dir("wan2_1")


@pytest.fixture(autouse=True)
def stock_areas(monkeypatch):
    """Undo what Qwen-Image-Edit's model cards, which tests execute, change for their process."""
    for name in ("edit", "edit_plus"):
        module = sys.modules.get(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        if module is not None:
            monkeypatch.setattr(module, "calculate_dimensions", module.calculate_dimensions)


@pytest.fixture
def tiny_config(tiny_sd3_dir, tmp_path):
    """Return the preset `tiny_ocr` shrunk to a random model of 32 px and a reward without model."""
    from config.grpo import tiny_ocr

    config = tiny_ocr()
    config.pretrained.model = tiny_sd3_dir
    config.logdir, config.run_name = str(tmp_path / "runs"), "run"
    config.reward_fn = {"jpeg_compressibility": 1.0}
    config.resolution = 32
    config.num_epochs = 2
    config.eval_freq = config.save_freq = 1
    config.sample.num_steps = config.eval.num_steps = 4
    config.sample.sde_window_range = (0, 3)
    config.sample.groups_per_epoch, config.sample.group_size = 4, 4
    config.sample.batch_size = 8
    config.train.updates_per_epoch, config.train.learning_rate = 2, 3e-4
    config.eval.num_prompts, config.eval.batch_size, config.eval.num_samples = 6, 4, 4
    config.trackers = ()
    return config.lock()


@pytest.fixture
def tiny_arguments(tiny_config) -> list[str]:
    """Return the command line that makes `tiny_config` of the preset `tiny_ocr`."""
    from config.grpo import get_config
    from flow_grpo.metrics import flatten

    before, after = flatten(get_config("tiny_ocr").to_dict()), flatten(tiny_config.to_dict())
    changed = [key for key in after if key in before and after[key] != before[key]]
    values = {key: str(after[key]).replace("[", "(").replace("]", ")") for key in changed}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    rewards = ",".join(f"{name}:{weight}" for name, weight in tiny_config.reward_fn.items())
    preset = f"{ROOT / 'config' / 'grpo.py'}:tiny_ocr"
    return ["--config", preset, *overrides, f"--config.reward_fn={rewards}"]


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Return the error line; there must be exactly one, and no trace."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err + self.out
        assert self.code == 1
        return lines[0]


@pytest.fixture
def train(capfd, monkeypatch):
    """Return a function that runs a train script with some arguments in this process."""
    from flow_grpo import cli
    from flow_grpo.models.sd3 import SD3

    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    root = logging.getLogger()
    handlers, levels = root.handlers[:], (root.level, cli.logger.level)

    def call(*arguments: str, adapter: type = SD3) -> Outcome:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", [f"train_{adapter.__name__.lower()}.py", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.run(adapter)
        return Outcome(exited.value.code, *capfd.readouterr())

    yield call
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    cli.logger.setLevel(levels[1])


@pytest.fixture
def fresh_accelerator():
    """Let a test choose its precision: accelerate keeps the first one of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def make_run():
    """Return a function that builds the `session.Run` of a configuration on the CPU."""
    from accelerate import Accelerator

    from flow_grpo import session
    from flow_grpo.models.sd3 import SD3
    from flow_grpo.run_folder import RunFolder

    built = []

    def build(config, adapter: type = SD3) -> session.Run:
        accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=True)
        plan = session.check_config(config, accelerator.num_processes)
        built.append(session.build(adapter, config, accelerator, plan, RunFolder(config)))
        return built[-1]

    yield build
    for run in built:
        run.rewards.close()
        run.folder.close()
