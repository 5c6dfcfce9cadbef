"""GRPO-Guard presets: ratios of mean log 0, gradients of one size over all steps.

    accelerate launch scripts/train_sd3.py --config config/grpo_guard.py:general_ocr_sd3_rationorm

Source: arXiv 2510.22319. The normalised ratio moves less, so its clip range is some 50 times
smaller. A reward of weight 0 is the gold one: scored in evaluation, to see over-optimisation.
"""

from ml_collections import ConfigDict

from config import grpo, models, tasks
from config.base import locked_config, preset


def _guard(config: ConfigDict, *, clip_range: float) -> None:
    config.algorithm = "grpo_guard"
    config.sample.global_std = False
    config.train.learning_rate = 1e-4
    config.train.clip_range = clip_range


def _sd3(*, clip_range: float) -> ConfigDict:
    """Return SD3.5-medium with 48 groups of 24 and 2 updates an epoch."""
    config = locked_config()
    models.sd3(config)
    _guard(config, clip_range=clip_range)
    config.eval_freq = 30
    config.save_freq = 30
    return config


def tiny_guard() -> ConfigDict:
    """Learn `tiny_ocr` by GRPO-Guard from all steps of a Flow-SDE: 2 CPU cores."""
    config = grpo.tiny_flow_sde()
    _guard(config, clip_range=2e-5)
    config.train.learning_rate = 1e-3
    return config


def tiny_guard_cps() -> ConfigDict:
    """Learn `tiny_ocr` by GRPO-Guard from two steps of a CPS: 2 CPU cores."""
    config = grpo.tiny_ocr()
    _guard(config, clip_range=2e-5)
    config.train.learning_rate = 1e-3
    return config


def compressibility() -> ConfigDict:
    """Make SD3.5-medium's images compress well at 768 px, without a reward model: 16 GPUs."""
    config = grpo.compressibility()
    _guard(config, clip_range=2e-6)
    return config


def general_ocr_sd3_rationorm() -> ConfigDict:
    """Text rendering with SD3.5-medium: 16 GPUs; OCR 0.9, gold PickScore still 21.8 (authors)."""
    config = _sd3(clip_range=2e-6)
    tasks.ocr(config)
    config.reward_fn = {"ocr": 1.0, "pickscore": 0.0}
    return config


def pickscore_hps_sd3_ratio_norm() -> ConfigDict:
    """Please people with SD3.5-medium: 16 GPUs.

    The published preset of this name has the one reward, in spite of its name.
    """
    config = _sd3(clip_range=4e-6)
    tasks.pickscore(config)
    return config


def geneval_sd3_rationorm() -> ConfigDict:
    """Compose objects with SD3.5-medium, gold PickScore beside: 16 GPUs."""
    config = _sd3(clip_range=2e-6)
    tasks.geneval(config)
    config.reward_fn = {"geneval": 1.0, "pickscore": 0.0}
    return config


def get_config(name: str = "tiny_guard") -> ConfigDict:
    """Return the preset called `name`, locked.

    Raises:
        ValueError: there is no such preset.
    """
    return preset(globals(), name)
