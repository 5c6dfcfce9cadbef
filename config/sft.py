"""SFT presets: imitate the best image of every group, held near the start by a KL of velocities.

    accelerate launch scripts/train_sd3.py --config config/sft.py:geneval_sd3

Published per rank: 24 images of one prompt, 1 batch, 1 update; on the 32 GPUs assumed here that is
32 groups of 24. Offline, all images are the start's own; online, the collecting weights are renewed
every 40 updates. The rwr presets weigh all images by a softmax over their group's rewards.
"""

from ml_collections import ConfigDict

from config import grpo, models, tasks
from config.base import locked_config, preset


def _sft(config: ConfigDict) -> None:
    config.algorithm = "sft"
    models.published_clean_images(config)
    config.train.kl_coef = 100.0


def _sd3() -> ConfigDict:
    config = locked_config()
    models.sd3(config)
    _sft(config)
    return config


def tiny_sft() -> ConfigDict:
    """Learn `tiny_ocr` from the best images that the start made: 2 CPU cores."""
    config = grpo.tiny_ocr()
    config.algorithm = "sft"
    config.train.kl_coef = 0.0  # 100, as published for SD3.5, holds this model still
    config.train.draws_per_sample = 8
    return config


def tiny_online_sft() -> ConfigDict:
    """Learn `tiny_ocr` from the best images of weights renewed every 40 updates: 2 CPU cores."""
    config = tiny_sft()
    config.train.old_update_freq = 40  # every 8, it soon learns from its own mistakes
    return config


def tiny_rwr() -> ConfigDict:
    """Learn `tiny_ocr` from all images that the start made, better ones more: 2 CPU cores."""
    config = tiny_sft()
    config.algorithm = "rwr"
    config.train.rwr_temperature = 0.2  # OCR accuracies differ by less than 1
    return config


def compressibility() -> ConfigDict:
    """Make SD3.5-medium's images compress well at 768 px, without a reward model: 32 GPUs."""
    config = grpo.compressibility()
    _sft(config)
    config.sample.batch_size = 1
    return config


def geneval_sd3() -> ConfigDict:
    """Compose objects with SD3.5-medium, offline: 32 GPUs."""
    config = _sd3()
    tasks.geneval(config)
    config.eval_freq = 40
    config.save_freq = 40
    return config


def pickscore_sd3() -> ConfigDict:
    """Please people with SD3.5-medium, offline: 32 GPUs."""
    config = _sd3()
    tasks.pickscore(config)
    return config


def online_geneval_sd3() -> ConfigDict:
    """`geneval_sd3` online: 32 GPUs."""
    config = geneval_sd3()
    config.train.old_update_freq = 40
    return config


def online_pickscore_sd3() -> ConfigDict:
    """`pickscore_sd3` online: 32 GPUs."""
    config = pickscore_sd3()
    config.train.old_update_freq = 40
    return config


def geneval_sd3_rwr() -> ConfigDict:
    """`geneval_sd3` by reward-weighted regression: 32 GPUs; it did not improve in the paper."""
    config = geneval_sd3()
    config.algorithm = "rwr"
    return config


def get_config(name: str = "tiny_sft") -> ConfigDict:
    """Return the preset called `name`, locked.

    Raises:
        ValueError: there is no such preset.
    """
    return preset(globals(), name)
