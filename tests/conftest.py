"""Fixtures: tiny pipelines saved once a session, and configurations that use them."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory) -> str:
    """Save a random SD3 without T5 and return its folder."""
    import tiny_models

    folder = tmp_path_factory.mktemp("tiny_sd3")
    tiny_models.sd3().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_sd3_t5_dir(tmp_path_factory) -> str:
    """Save a random SD3 with T5 and return its folder."""
    import tiny_models

    folder = tmp_path_factory.mktemp("tiny_sd3_t5")
    tiny_models.sd3(with_t5=True).save_pretrained(folder)
    return str(folder)


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
    config.eval.num_prompts, config.eval.batch_size, config.eval.num_samples = 6, 4, 4
    config.trackers = ()
    return config.lock()
