"""Flow-DPO presets: the best and the worst image of a group as a preference pair.

    accelerate launch scripts/train_sd3.py --config config/dpo.py:geneval_sd3

Published per rank: 24 images of one prompt, 1 batch, 1 update; on the 32 GPUs assumed here that is
32 groups of 24. Offline, all images are the start's own; online, the collecting weights are renewed
every 40 updates. Each pair is seen at 39 noise levels an update.
"""

from ml_collections import ConfigDict

from config import grpo, models, tasks
from config.base import locked_config, preset


def _dpo(config: ConfigDict) -> None:
    config.algorithm = "dpo"
    models.published_clean_images(config)
    config.train.draws_per_sample = 39
    config.train.dpo_beta = 100.0


def _sd3() -> ConfigDict:
    config = locked_config()
    models.sd3(config)
    _dpo(config)
    return config


def tiny_dpo() -> ConfigDict:
    """Learn `tiny_ocr` from pairs that the start made: 2 CPU cores."""
    config = grpo.tiny_ocr()
    config.algorithm = "dpo"
    config.train.draws_per_sample = 8
    return config


def tiny_online_dpo() -> ConfigDict:
    """Learn `tiny_ocr` from pairs of weights renewed every 8 updates: 2 CPU cores."""
    config = tiny_dpo()
    config.train.old_update_freq = 8
    config.train.dpo_beta = 1000.0  # each renewal forgets how far it is from the start
    return config


def compressibility() -> ConfigDict:
    """Make SD3.5-medium's images compress well at 768 px, without a reward model: 32 GPUs."""
    config = grpo.compressibility()
    _dpo(config)
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
    """`geneval_sd3` online: 32 GPUs; the second best method of the paper, behind GRPO."""
    config = geneval_sd3()
    config.train.old_update_freq = 40
    return config


def online_pickscore_sd3() -> ConfigDict:
    """`pickscore_sd3` online: 32 GPUs."""
    config = pickscore_sd3()
    config.train.old_update_freq = 40
    return config


def get_config(name: str = "tiny_dpo") -> ConfigDict:
    """Return the preset called `name`, locked.

    Raises:
        ValueError: there is no such preset.
    """
    return preset(globals(), name)
