"""DiffusionNFT presets: learn on the forward process, from what is better and what is worse.

    accelerate launch scripts/train_sd3.py --config config/nft.py:general_ocr_sd3

Source: arXiv 2509.16117. Images come from an ODE solver, so there is no window, no log-probability
and no guidance; the collecting weights follow the trained ones slowly.
"""

from ml_collections import ConfigDict

from config import grpo, models, tasks
from config.base import locked_config, preset


def _nft(config: ConfigDict) -> None:
    config.algorithm = "nft"
    config.sample.noise_level = 0.0
    config.sample.ode_solver = "dpm2m"
    config.train.updates_per_epoch = 1
    config.train.nft_beta = 1.0
    config.train.kl_coef = 1e-4


def tiny_nft() -> ConfigDict:
    """Learn `tiny_ocr` from images of an ODE solver: 2 CPU cores."""
    config = grpo.tiny_flow_sde()  # the one without a window
    _nft(config)
    config.train.updates_per_epoch = 4
    config.train.draws_per_sample = 4
    config.train.nft_beta = 0.1
    return config


def general_ocr_sd3() -> ConfigDict:
    """Text rendering with SD3.5-medium, no guidance: 8 GPUs.

    9 noise levels an image: as many as `config/grpo.py:general_ocr_sd3` trains steps.
    """
    config = locked_config()
    models.sd3(config)
    tasks.ocr(config)
    _nft(config)
    config.sample.guidance_scale = 1.0
    config.eval.guidance_scale = 1.0
    config.train.draws_per_sample = 9
    return config


def get_config(name: str = "tiny_nft") -> ConfigDict:
    """Return the preset called `name`, locked.

    Raises:
        ValueError: there is no such preset.
    """
    return preset(globals(), name)
