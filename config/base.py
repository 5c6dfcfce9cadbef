"""Hold every field of a run once: its default, its unit, one comment.

A preset starts from `locked_config()`, so a key that does not exist is an error in the preset
itself, not a setting that nobody reads. Sequences are tuples (lists cannot be overridden on the
command line). The fields under "old names" are those of yifan123/flow_grpo; they are translated
once, at the start of a run, into the fields above them (`flow_grpo/old_names.py`).
"""

import difflib
from types import FunctionType

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def locked_config() -> ConfigDict:
    """Return the default configuration, locked."""
    config = _run()
    config.update(_data_and_model())
    config.sample = _sample()
    config.train = _train()
    config.eval = _eval()
    _add_old_names(config)
    return config.lock()


def _run() -> ConfigDict:
    config = ConfigDict()
    config.run_name = ""  # folder below logdir; "" takes the preset's name
    config.logdir = "runs"  # parent of the run folders
    config.seed = 42  # prompts, noise, windows and adapter init are functions of it
    config.num_epochs = 1000  # collect + train rounds; may be raised when resuming
    config.algorithm = "grpo"  # grpo | grpo_guard | dpo | sft | rwr | nft
    config.control = "none"  # none | permute_rewards | flip_advantages: runs that must not learn
    config.trackers = ("tensorboard",)  # beside metrics.jsonl: tensorboard, wandb, swanlab, trackio
    config.eval_freq = 60  # epochs between evaluations (also before the first and after the last)
    config.save_freq = 60  # epochs between checkpoints
    config.num_checkpoint_limit = 5  # newest checkpoints kept; the best one is kept besides
    config.resume_from = ""  # "" = newest checkpoint of the run folder; or a checkpoint folder
    config.mixed_precision = "fp16"  # no | fp16 | bf16
    config.allow_tf32 = True  # TF32 matrix products on CUDA
    config.use_lora = True  # False trains the whole transformer
    return config


def _data_and_model() -> ConfigDict:
    config = ConfigDict()
    config.dataset = "dataset/ocr"  # folder with {train,test}.txt or {train,test}_metadata.jsonl
    config.prompt_fn = "general_ocr"  # general_ocr: .txt, geneval: .jsonl with metadata
    config.unreadable_images = "stop"  # stop | skip: prompts whose reference image cannot be read
    config.resolution = 512  # image height and width, pixels
    config.width = 0  # pixels, where it differs from the height; 0 = resolution
    config.reference_resolution = 1024  # side of a square: pixels of what Qwen-Image-Edit sees
    config.num_frames = 33  # of a clip, one more than a multiple of 4; read by video models only
    config.reward_fn = ConfigDict({"ocr": 1.0})  # weights; 0 = evaluation only
    config.reward = ConfigDict()
    config.reward.timeout_s = 120.0  # seconds for one batch of one reward; beyond it has failed
    config.reward.num_workers = 2  # workers per reward and process
    config.pretrained = ConfigDict()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"  # hub id or folder
    config.pretrained.revision = "main"  # branch, tag or commit on the hub
    config.pretrained.use_t5 = True  # False: without the third text encoder
    return config


def _sample() -> ConfigDict:
    sample = ConfigDict()
    sample.num_steps = 10  # denoising steps of a rollout
    sample.guidance_scale = 4.5  # 1 = no classifier-free guidance, half the cost
    sample.groups_per_epoch = 48  # prompts drawn for an epoch, over all ranks
    sample.group_size = 24  # images of one prompt
    sample.batch_size = 9  # images in a forward of one rank, at most (memory)
    sample.sde_type = "flow_sde"  # flow_sde | cps | dance_sde
    sample.noise_level = 0.7  # a of Flow-SDE, eta of CPS and Dance-SDE
    sample.sde_window_size = 0  # stochastic, trained steps; 0 = all but the last
    sample.sde_window_range = (0, 0)  # window lies in [lo, hi); (0, 0) = all but the last step
    sample.sde_window_strategy = "random"  # random | progressive | decay | exp_decay
    sample.sde_window_epochs = 25  # epochs that a sliding window stays at its first place
    sample.sde_window_shift = 1  # steps that a sliding window moves
    sample.sde_window_roll_back = False  # a sliding window starts again after its last place
    sample.sde_window_decay = 0.1  # k of exp_decay
    sample.sde_window_decay_from = 13  # exp_decay: the first start whose stay is shortened
    sample.ode_solver = "euler"  # of the steps without noise: euler | dpm2m (second order)
    sample.same_latent = False  # members of a group share their initial noise
    sample.mini_group_size = 0  # members that share it; 0 = the whole group
    sample.branching = False  # run the steps before the window once for those that share it
    sample.global_std = True  # advantages divided by the std of all rewards, else the group's
    sample.max_sequence_length = 128  # tokens of the third text encoder (0 = none)
    sample.prompt_cache_size = 4096  # encoded prompts kept in host memory
    sample.offload_text_encoders = False  # encode every prompt first, then free the device
    return sample


def _train() -> ConfigDict:
    train = ConfigDict()
    train.learning_rate = 3e-4  # AdamW, peak
    train.lr_schedule = "constant"  # constant | linear | cosine (to 0 at num_epochs)
    train.lr_warmup_updates = 0  # optimizer steps of linear warm-up
    train.adam_beta1 = 0.9
    train.adam_beta2 = 0.999
    train.adam_weight_decay = 1e-4
    train.adam_epsilon = 1e-8
    train.max_grad_norm = 1.0  # global gradient norm is clipped to this
    train.updates_per_epoch = 2  # optimizer steps per epoch and inner epoch
    train.num_inner_epochs = 1  # passes over the samples of an epoch
    train.steps_per_update = 0  # trained steps in an update; 0 = all of a sample's
    train.timestep_fraction = 1.0  # share of num_steps trained, drawn anew every epoch
    train.adv_type = "grpo"  # grpo | gdpo | reinforce_pp
    train.adv_clip_max = 5.0  # advantages are clipped to +- this
    train.clip_range = 1e-4  # epsilon of the ratio (log-probs are means per element)
    train.clip_range_high = 0.0  # upper epsilon where it differs; 0 = clip_range
    train.kl_coef = 0.0  # weight of the KL to the reference
    train.kl_type = "auto"  # gaussian | velocity | velocity_std; auto = gaussian, for cps velocity
    train.kl_scale = "true"  # true | reference (times dt, as published coefficients assume)
    train.old_update_freq = 0  # dpo, sft, rwr: updates between renewals of the collecting weights
    train.draws_per_sample = 1  # dpo, sft, rwr, nft: noise levels drawn for a sample or pair
    train.dpo_beta = 100.0  # strength of DPO's implicit KL
    train.rwr_temperature = 1.0  # of the softmax over a group's rewards
    train.nft_beta = 1.0  # distance of NFT's implicit policies from the collecting one
    train.nft_old_decay = 0.5  # largest decay of NFT's collecting weights, per epoch
    train.nft_old_ramp = 0.001  # growth of that decay per update
    train.ratio_tolerance = 1e-4  # a first |ratio - 1| beyond it or clip_range is an error
    train.gradient_checkpointing = False  # slower, less memory
    train.ema = True  # evaluate and export a moving average of the weights
    train.ema_decay = 0.987  # per optimizer step (0.9 every 8th, as published)
    train.lora_rank = 32
    train.lora_alpha = 64
    train.lora_path = ""  # warm start: diffusers LoRA file or folder, or a PEFT folder
    return train


def _eval() -> ConfigDict:
    """Return the settings of evaluation: held-out prompts, EMA weights, ODE, fixed seeds."""
    evaluation = ConfigDict()
    evaluation.num_steps = 40  # denoising steps
    evaluation.guidance_scale = 4.5  # 1 = no classifier-free guidance
    evaluation.batch_size = 16  # images in a forward of one rank
    evaluation.num_prompts = 0  # first prompts of the test split; 0 = all
    evaluation.num_samples = 16  # images kept in samples/ for the report
    return evaluation


def preset(namespace: dict, name: str) -> ConfigDict:
    """Return the preset `name` among the functions that a config file defines, locked.

    Args:
        namespace: the file's `globals()`.
        name: the preset; it is also the default `run_name`.

    Raises:
        ValueError: there is no such preset; the message lists those there are.
    """
    presets = {
        key: value
        for key, value in namespace.items()
        if isinstance(value, FunctionType)
        and value.__module__ != __name__  # nor what the presets are made by
        and key != "get_config"
        and not key.startswith("_")
    }
    if name not in presets:
        near = difflib.get_close_matches(name or "", presets, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown preset {name!r}; allowed: {', '.join(sorted(presets))}; nearest: {near[0]}"
        )
    config = presets[name]()
    config.run_name = config.run_name or name
    # lock() passes over a locked config, but a dict that was assigned in it is unlocked.
    return config.unlock().lock()


def _add_old_names(config: ConfigDict) -> None:
    """Add the reference's field names, unset; `None` means "not given"."""
    config.sample.num_batches_per_epoch = placeholder(int)
    config.sample.train_batch_size = placeholder(int)
    config.sample.num_image_per_prompt = placeholder(int)
    config.sample.mini_num_image_per_prompt = placeholder(int)
    config.sample.train_num_steps = placeholder(int)
    config.sample.test_batch_size = placeholder(int)
    config.sample.eval_num_steps = placeholder(int)
    config.sample.eval_guidance_scale = placeholder(float)
    config.train.beta = placeholder(float)
    config.train.algorithm = placeholder(str)
    config.train.ref_update_step = placeholder(int)
    config.train.clip_range_lt = placeholder(float)
    config.train.clip_range_gt = placeholder(float)
    config.train.batch_size = placeholder(int)
    config.train.gradient_accumulation_steps = placeholder(int)
