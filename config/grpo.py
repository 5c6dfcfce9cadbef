"""GRPO presets: base(model, task) and the lines that differ.

    accelerate launch scripts/train_sd3.py --config config/grpo.py:general_ocr_sd3

`kl_scale = "reference"` stands where a published KL coefficient was tuned for the reference
code, whose KL is the true Gaussian one times dt. A preset states what an epoch is, not how many
GPUs there are; the number in its first line is the one it was published for.
"""

from ml_collections import ConfigDict

from config import models, tasks
from config.base import locked_config, preset
from config.grpo_families import (  # noqa: F401
    counting_flux_kontext,
    counting_qwenimage_edit,
    counting_qwenimage_edit_8gpu,
    counting_qwenimage_edit_fast,
    dual_ref_qwenimage_edit_plus_fast,
    general_ocr_flux2_klein,
    general_ocr_wan2_1,
    general_ocr_zimage,
    geneval_flux_fast,
    pickscore_flux,
    pickscore_flux_8gpu,
    pickscore_flux_fast,
    pickscore_qwenimage,
    pickscore_qwenimage_8gpu,
)


def tiny_ocr() -> ConfigDict:
    """Teach the shipped small SD3 to write. 2 CPU cores, 10 minutes."""
    config = locked_config()
    models.tiny_sd3(config)
    tasks.tiny_ocr(config)
    config.num_epochs = 40
    config.eval_freq = 20
    config.save_freq = 5
    config.num_checkpoint_limit = 2
    config.sample.groups_per_epoch = 24
    config.sample.group_size = 8
    config.sample.batch_size = 24
    config.sample.sde_type = "cps"
    config.sample.noise_level = 0.8
    config.sample.sde_window_size = 2
    config.sample.sde_window_range = (0, 5)
    config.train.learning_rate = 1e-3
    config.train.updates_per_epoch = 4
    config.train.clip_range = 1e-4
    config.eval.batch_size = 32
    config.eval.num_prompts = 128
    return config


def tiny_jpeg() -> ConfigDict:
    """Teach the shipped small SD3 to paint images that compress well. 2 CPU cores, minutes."""
    config = tiny_ocr()
    tasks.jpeg(config)
    return config


def tiny_flow_sde() -> ConfigDict:
    """Learn `tiny_ocr` from all steps of a Flow-SDE, as `general_ocr_sd3` does: 2 CPU cores."""
    config = tiny_ocr()
    config.sample.sde_type = "flow_sde"
    config.sample.noise_level = 0.7
    config.sample.sde_window_size = 0
    config.sample.sde_window_range = (0, 0)
    return config


def tiny_branching() -> ConfigDict:
    """Learn `tiny_ocr` from trajectories that branch once per four images: 2 CPU cores."""
    config = tiny_ocr()
    config.sample.same_latent = True
    config.sample.branching = True
    config.sample.mini_group_size = 4
    config.sample.sde_window_range = (0, 6)  # it starts in the first half of the 8 steps
    return config


def tiny_mix() -> ConfigDict:
    """Learn `tiny_ocr` with a window that slides, as in MixGRPO: 2 CPU cores.

    Source: arXiv 2507.21802; second-order steps outside the window as in its Flash variant.
    """
    config = tiny_ocr()
    config.sample.same_latent = True
    config.sample.sde_window_strategy = "progressive"
    config.sample.sde_window_epochs = 10  # 4 places in 40 epochs
    config.sample.ode_solver = "dpm2m"
    return config


def tiny_gdpo() -> ConfigDict:
    """Learn to write and to compress well, each reward normalised by itself: 2 CPU cores."""
    config = tiny_ocr()
    config.reward_fn = {"ocr": 1.0, "jpeg_compressibility": 0.2}
    config.train.adv_type = "gdpo"
    return config


def tiny_reinforce_pp() -> ConfigDict:
    """Learn `tiny_ocr` with advantages over the whole epoch, not the group: 2 CPU cores."""
    config = tiny_ocr()
    config.train.adv_type = "reinforce_pp"
    return config


def tiny_mr() -> ConfigDict:
    """Learn two rewards in the shape of DeepGen's MR-GRPO: 2 CPU cores.

    One noise a group, CPS at full strength, 0.6 of the steps drawn anew every epoch, an update
    for every one of them, a faint KL of velocities over the step's variance.
    """
    config = tiny_gdpo()
    config.sample.noise_level = 1.0
    config.sample.sde_window_size = 0
    config.sample.sde_window_range = (0, 0)
    config.sample.same_latent = True
    config.train.timestep_fraction = 0.6
    config.train.steps_per_update = 1
    config.train.updates_per_epoch = 1
    config.train.kl_coef = 5e-7
    config.train.kl_type = "velocity_std"
    return config


def compressibility() -> ConfigDict:
    """Make SD3.5-medium's images compress well at 768 px, without a reward model: 32 GPUs.

    The reference's preset of this name has groups of one image, which carry no signal; here the
    default 48 x 24 stands.
    """
    config = locked_config()
    models.sd3(config)
    tasks.jpeg(config)
    config.dataset = "dataset/pickscore_sfw"
    config.resolution = 768
    config.eval_freq = 20
    config.save_freq = 20
    config.sample.num_steps = 40
    config.sample.batch_size = 1
    config.eval.batch_size = 1
    config.train.ema = False
    return config


def general_ocr_sd3() -> ConfigDict:
    """Text rendering with SD3.5-medium: 32 GPUs; OCR accuracy 0.59 -> 0.92 (paper)."""
    config = locked_config()
    models.sd3(config)
    tasks.ocr(config)
    config.eval_freq = 60
    config.save_freq = 60
    config.sample.groups_per_epoch = 48
    config.sample.group_size = 24
    config.sample.batch_size = 9
    config.train.kl_coef = 0.04
    config.train.kl_scale = "reference"
    return config


def geneval_sd3() -> ConfigDict:
    """Compose objects with SD3.5-medium: 32 GPUs; GenEval 0.63 -> 0.95 (paper)."""
    config = general_ocr_sd3()
    tasks.geneval(config)
    return config


def pickscore_sd3() -> ConfigDict:
    """Please people with SD3.5-medium: 32 GPUs; PickScore 21.7 -> 23.3 (paper)."""
    config = general_ocr_sd3()
    tasks.pickscore(config)
    config.train.kl_coef = 0.01
    return config


def clipscore_sd3() -> ConfigDict:
    """Follow prompts better with SD3.5-medium, one initial noise a group: 32 GPUs."""
    config = general_ocr_sd3()
    tasks.clipscore(config)
    config.sample.same_latent = True
    config.train.kl_coef = 0.02
    return config


def _without_kl(config: ConfigDict) -> None:
    config.train.kl_coef = 0.0
    config.train.kl_scale = "true"


def _fast_nocfg(config: ConfigDict) -> None:
    """Train three neighbouring steps of a CPS, without guidance in training and evaluation."""
    _without_kl(config)
    config.sample.guidance_scale = 1.0
    config.eval.guidance_scale = 1.0
    config.sample.sde_type = "cps"
    config.sample.noise_level = 0.8
    config.sample.sde_window_size = 3
    config.sample.sde_window_range = (0, 5)
    config.train.clip_range = 1e-5


def geneval_sd3_fast_nocfg() -> ConfigDict:
    """`geneval_sd3`, three steps trained, no guidance: 32 GPUs; GenEval 0.28 -> 0.95 (authors).

    390 hours of an H800 by their curve; 0.28 is the start without guidance.
    """
    config = geneval_sd3()
    _fast_nocfg(config)
    return config


def pickscore_sd3_fast_nocfg() -> ConfigDict:
    """`pickscore_sd3`, three steps trained, no guidance: 32 GPUs; 19.8 -> 23.9 (authors).

    150 hours of an H800 by their curve; 19.8 is the start without guidance.
    """
    config = pickscore_sd3()
    _fast_nocfg(config)
    config.sample.groups_per_epoch = 64
    config.sample.group_size = 18
    return config


def fast_nocfg() -> ConfigDict:
    """`geneval_sd3_fast_nocfg` by its short name: 32 GPUs."""
    return geneval_sd3_fast_nocfg()


def _fast(config: ConfigDict) -> None:
    """Run the steps up to a random one of the first half once per nine images, then branch."""
    _without_kl(config)
    config.sample.groups_per_epoch = 64
    config.sample.group_size = 18
    config.sample.same_latent = True
    config.sample.branching = True
    config.sample.mini_group_size = 9
    config.sample.sde_type = "cps"
    config.sample.noise_level = 0.8
    config.sample.sde_window_size = 2
    config.sample.sde_window_range = (0, 7)  # it starts in 0..5: T/2 of the 10 steps
    config.train.clip_range = 1e-5


def geneval_sd3_fast() -> ConfigDict:
    """`geneval_sd3` with trajectories that branch (original Flow-GRPO-Fast): 32 GPUs.

    A group of 18 has two prefixes of nine images; the original's k = 24 with mini-groups of 9 made
    the same 18. Two steps after the branch are stochastic and trained.
    """
    config = geneval_sd3()
    _fast(config)
    return config


def pickscore_sd3_fast() -> ConfigDict:
    """`pickscore_sd3` with trajectories that branch (original Flow-GRPO-Fast): 32 GPUs.

    A group of 18 has two prefixes of nine images; the original's k = 24 with mini-groups of 9 made
    the same 18. Two steps after the branch are stochastic and trained.
    """
    config = pickscore_sd3()
    _fast(config)
    return config


def grpo_guard() -> ConfigDict:
    """`config/grpo_guard.py:general_ocr_sd3_rationorm` by a short name: 16 GPUs."""
    from config.grpo_guard import general_ocr_sd3_rationorm  # it builds on this file

    return general_ocr_sd3_rationorm()


def general_ocr_sd3_4gpu() -> ConfigDict:
    """`general_ocr_sd3` for 4 GPUs: 16 groups of 16."""
    config = general_ocr_sd3()
    config.sample.groups_per_epoch = 16
    config.sample.group_size = 16
    config.sample.batch_size = 8
    return config


def pickscore_sd3_4gpu() -> ConfigDict:
    """`pickscore_sd3` for 4 GPUs: 16 groups of 16."""
    config = pickscore_sd3()
    config.sample.groups_per_epoch = 16
    config.sample.group_size = 16
    config.sample.batch_size = 8
    return config


def general_ocr_sd3_1gpu() -> ConfigDict:
    """`general_ocr_sd3` for 1 GPU: 8 groups of 8."""
    config = general_ocr_sd3()
    config.sample.groups_per_epoch = 8
    config.sample.group_size = 8
    config.sample.batch_size = 8
    return config


def get_config(name: str = "tiny_ocr") -> ConfigDict:
    """Return the preset called `name`, locked.

    Raises:
        ValueError: there is no such preset.
    """
    return preset(globals(), name)
