"""Tell which settings a run reads, so that one which the chosen algorithm ignores is an error."""

import logging
from collections.abc import Collection

from ml_collections import ConfigDict

logger = logging.getLogger(__name__)

# Settings that only some algorithms, windows or samplers read, with their defaults.
CHOICES = {
    "sample.sde_type": "flow_sde",
    "sample.sde_window_size": 0,
    "sample.sde_window_range": (0, 0),
    "sample.sde_window_strategy": "random",
    "sample.sde_window_epochs": 25,
    "sample.sde_window_shift": 1,
    "sample.sde_window_roll_back": False,
    "sample.sde_window_decay": 0.1,
    "sample.sde_window_decay_from": 13,
    "sample.mini_group_size": 0,
    "sample.branching": False,
    "sample.global_std": True,
    "train.steps_per_update": 0,
    "train.timestep_fraction": 1.0,
    "train.adv_type": "grpo",
    "train.adv_clip_max": 5.0,
    "train.clip_range": 1e-4,
    "train.clip_range_high": 0.0,
    "train.kl_coef": 0.0,
    "train.kl_type": "auto",
    "train.kl_scale": "true",
    "train.old_update_freq": 0,
    "train.draws_per_sample": 1,
    "train.dpo_beta": 100.0,
    "train.rwr_temperature": 1.0,
    "train.nft_beta": 1.0,
    "train.nft_old_decay": 0.5,
    "train.nft_old_ramp": 0.001,
}


def image_size(config) -> tuple[int, int]:
    """Return (height, width) in pixels."""
    return (config.resolution, config.width or config.resolution)


def reward_weights(config) -> dict[str, float]:
    """Return {reward: weight}; "/" in a key stands for the "." that config keys cannot hold."""
    return {name.replace("/", "."): weight for name, weight in config.reward_fn.items()}


class Recorded:
    """View of a configuration that remembers the dotted names of the fields it was asked for."""

    def __init__(self, config: ConfigDict, seen: set[str] | None = None, prefix: str = ""):
        self._config, self._prefix = config, prefix
        self.seen = set() if seen is None else seen

    def __getattr__(self, name: str):
        value = getattr(self._config, name)
        if isinstance(value, ConfigDict):
            return Recorded(value, self.seen, f"{self._prefix}{name}.")
        self.seen.add(self._prefix + name)
        return value


def refuse_unread(config: ConfigDict, seen: set[str], given: Collection[str] = ()) -> None:
    """Refuse settings of `CHOICES` that were changed and that nothing reads.

    Args:
        config: of the run.
        seen: what was read, as `Recorded` notes it.
        given: the keys that a user gave beside a preset. Only these are refused then; what the
            preset itself sets and they switched off is told in the log.

    Raises:
        ValueError: names all of them and their defaults.
    """
    unread = {}
    for dotted, default in CHOICES.items():
        section, name = dotted.split(".")
        value = config[section][name]
        value = tuple(value) if isinstance(default, tuple) else value
        if dotted not in seen and value != default:
            unread[dotted] = f"{dotted} ({value}; default {default})"
    refused = [text for dotted, text in unread.items() if not given or dotted in given]
    if refused:
        raise ValueError(
            f"algorithm {config.algorithm!r} does not read {', '.join(refused)} with these "
            "settings; leave that at its default or choose what reads it (docs/algorithms.md)"
        )
    if unread:
        logger.warning("not read with these settings: %s", ", ".join(unread.values()))
