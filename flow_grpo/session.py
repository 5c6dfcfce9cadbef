"""Build what a run consists of, checking everything a user can get wrong before it costs time."""

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate.utils import broadcast_object_list
from torch import Tensor

from flow_grpo import backends, registry
from flow_grpo.batching import BatchPlan, plan_batches
from flow_grpo.data import Prompt
from flow_grpo.epoch_steps import check_steps, epoch_steps
from flow_grpo.images import UNREADABLE, image_tensor
from flow_grpo.models.base import Cond, FlowModel
from flow_grpo.models.loading import half_precision_dtype, resolve_model
from flow_grpo.old_names import RENAMED, translate_old_names
from flow_grpo.policy import Policy
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.prompt_sets import usable_prompts
from flow_grpo.rewards.client import RewardClient
from flow_grpo.schedules import learning_rate
from flow_grpo.sde import SDES, SOLVERS
from flow_grpo.settings import Recorded, image_size, refuse_unread, reward_weights
from flow_grpo.trackers import check_trackers

logger = logging.getLogger(__name__)

ALGORITHMS, REWARDS = "flow_grpo.algorithms", "flow_grpo.rewards"
CHOICES = {
    "sample.sde_type": SDES,
    "sample.ode_solver": SOLVERS,
    "unreadable_images": UNREADABLE,
    "control": ("none", "permute_rewards", "flip_advantages"),
}
AT_LEAST = {
    "resolution": 1,
    "width": 0,
    "num_frames": 1,
    "num_epochs": 1,
    "eval_freq": 1,
    "save_freq": 1,
    "num_checkpoint_limit": 1,
    "sample.prompt_cache_size": 1,
    "train.num_inner_epochs": 1,
    "train.steps_per_update": 0,
    "train.clip_range_high": 0.0,
    "train.old_update_freq": 0,
    "train.draws_per_sample": 1,
    "sample.num_steps": 1,
    "sample.noise_level": 0.0,
    "train.lora_rank": 1,
    "train.learning_rate": 0.0,
    "train.kl_coef": 0.0,
    "eval.num_steps": 1,
    "eval.batch_size": 1,
    "eval.num_prompts": 0,
    "eval.num_samples": 0,
}
# 0 would silently stop learning; a large number switches a clip off.
ABOVE_ZERO = (
    "train.clip_range",
    "train.dpo_beta",
    "train.adv_clip_max",
    "train.max_grad_norm",
    "train.lora_alpha",
    "train.ratio_tolerance",
    "sample.guidance_scale",
    "eval.guidance_scale",
)


@dataclass
class TrainState:
    """What a run has behind it; with weights, optimizer and average, all there is to resume."""

    epoch: int = 0
    update: int = 0


@dataclass
class Run:
    """Everything the loop works with; one per process."""

    config: object
    accelerator: object
    plan: BatchPlan
    folder: object  # run_folder.RunFolder on the main process, else None
    model: FlowModel
    policy: Policy
    algorithm: object
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    prompt_cache: PromptCache
    rewards: RewardClient
    weights: dict[str, float]
    state: TrainState = field(default_factory=TrainState)
    trackers: list = field(default_factory=list)
    eval_total: float | None = None  # of the current epoch, if it was evaluated
    best_total: float = -math.inf  # of the published checkpoints

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width) in pixels."""
        return image_size(self.config)

    def conditions(self, prompts: Sequence[Prompt]) -> Cond:
        """Return what the model is told of `prompts`, on the device."""
        texts, device = [p.prompt for p in prompts], self.accelerator.device
        images = [p.images for p in prompts] if self.model.max_images else None
        return self.prompt_cache(texts, device, images)

    def reference_images(self, prompts: Sequence[Prompt]) -> list[tuple[Tensor, ...]] | None:
        """Return each prompt's images (3, h, w) in [0, 1], as large as their files have them."""
        if not self.model.max_images:
            return None
        paths = dict.fromkeys(path for p in prompts for path in p.images)
        tensors = {path: image_tensor(path) for path in paths}
        return [tuple(tensors[path] for path in p.images) for p in prompts]

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files."""
        return self.accelerator.is_main_process

    @property
    def is_new_best(self) -> bool:
        """Return whether this epoch was evaluated better than every checkpoint."""
        return self.eval_total is not None and self.eval_total > self.best_total


def check_config(
    config,
    world_size: int,
    given: Collection[str] | None = None,
    adapter: type[FlowModel] | None = None,
) -> BatchPlan:
    """Check every setting that needs no model, and return the batch plan.

    Args:
        config: of the run.
        world_size: number of processes.
        given: the keys that a user gave beside a preset, such as "train.clip_range".
        adapter: of the family to train; without it, nothing is checked against what it makes.

    Raises:
        ValueError: what came, what is allowed, the nearest valid value.
    """
    for old, new in translate_old_names(config, world_size).items():
        logger.info("%s is an old name: %s", old, new)
    plan = plan_batches(
        groups_per_epoch=config.sample.groups_per_epoch,
        group_size=config.sample.group_size,
        updates_per_epoch=config.train.updates_per_epoch,
        batch_size=config.sample.batch_size,
        world_size=world_size,
    )
    _check_values(config)
    _check_algorithm(config, {RENAMED.get(name, name) for name in given or ()})
    learning_rate(
        0,
        peak=config.train.learning_rate,
        warmup_updates=config.train.lr_warmup_updates,
        total_updates=total_updates(config),
        schedule=config.train.lr_schedule,
    )
    half_precision_dtype(config.mixed_precision)
    resolve_model(config.pretrained.model)
    parts = Path(config.run_name).parts
    if not parts or ".." in parts or Path(config.run_name).is_absolute():
        raise ValueError(
            f"run_name ({config.run_name!r}) must name a folder below logdir ({config.logdir}), "
            "such as my_run; logdir may lie anywhere"
        )
    if not any(config.reward_fn.values()):
        raise ValueError("reward_fn gives no reward a weight other than 0: nothing to learn from")
    for name in reward_weights(config):
        reward = registry.load(REWARDS, name)
        _check_scope(name, reward, plan)
        if adapter is not None:
            _check_media(name, reward, adapter)
    if plan.batch_size < min(config.sample.batch_size, plan.samples_per_rank) / 2:
        logger.warning(
            "batches of %d, not %d: the largest divisor of the %d samples of a rank",
            plan.batch_size, config.sample.batch_size, plan.samples_per_rank,
        )  # fmt: skip
    check_trackers(config.trackers)
    return plan


def _check_values(config) -> None:
    """Raise ValueError for a name that is none of the choices and a number outside its range."""

    def value(dotted: str):
        *section, name = dotted.split(".")
        return (config[section[0]] if section else config)[name]

    for dotted, choices in CHOICES.items():
        if value(dotted) not in choices:
            raise ValueError(registry.unknown(dotted, value(dotted), choices))
    for dotted, least in AT_LEAST.items():
        if not least <= value(dotted) < math.inf:
            raise ValueError(f"{dotted} ({value(dotted)}) must be finite and at least {least}")
    for dotted in ABOVE_ZERO:
        if not 0 < value(dotted) < math.inf:
            raise ValueError(f"{dotted} ({value(dotted)}) must be finite and above 0")
    if config.train.lora_path and not config.use_lora:
        raise ValueError("train.lora_path is given but use_lora is False; set one or the other")


def _check_scope(name: str, reward: type, plan: BatchPlan) -> None:
    """Raise ValueError if a reward that compares whole groups would be given parts of them."""
    if getattr(reward, "scope", "sample") == "group" and plan.batch_size % plan.group_size:
        raise ValueError(
            f"reward {name} scores whole groups, but a batch of {plan.batch_size} is no whole "
            f"number of groups of {plan.group_size}; set sample.batch_size to a multiple that "
            f"divides the {plan.samples_per_rank} samples of a rank"
        )


def _check_media(name: str, reward: type, adapter: type[FlowModel]) -> None:
    """Raise ValueError if a reward cannot score what the family makes."""
    if getattr(reward, "needs_reference", False) and not adapter.max_images:
        raise ValueError(
            f"reward {name} compares an image with the one that was edited, but "
            f"{adapter.__name__} edits none; take it out of reward_fn"
        )
    made, scored = adapter.task.rpartition("-")[2], getattr(reward, "media", ("image",))
    if made not in scored:
        able = [
            other
            for other in registry.names(REWARDS)
            if made in getattr(registry.load(REWARDS, other), "media", ("image",))
        ]
        raise ValueError(
            f"reward {name} scores {' and '.join(scored)}, but {adapter.__name__} makes {made}; "
            f"rewards for it: {', '.join(able)} (a reward of yours says so by `media`)"
        )


def _check_algorithm(config, given: set[str]) -> None:
    """Raise ValueError for what the algorithm cannot do and for a setting that nothing reads."""
    recorded = Recorded(config)
    algorithm = registry.load(ALGORITHMS, config.algorithm)(recorded)
    if not hasattr(algorithm, "keeps"):
        raise ValueError(
            f"algorithm {config.algorithm!r} is no algorithm (flow_grpo/algorithms/base.py says "
            f"what one has); there are {', '.join(registry.names(ALGORITHMS))}"
        )
    trains_steps = "window" in algorithm.keeps
    check_steps(config, trains_steps=trains_steps)
    steps = epoch_steps(recorded, 0, trains_steps=trains_steps)
    seen = recorded.seen
    if trains_steps:
        seen.add("train.steps_per_update")
    if steps.stochastic:
        seen.add("sample.sde_type")
    refuse_unread(config, seen, given)


def updates_per_epoch(config) -> int:
    """Return the optimizer steps of an epoch that trains on all of its samples."""
    train, chunks = config.train, 1
    if train.steps_per_update:
        num_trained = len(epoch_steps(config, 0, trains_steps=True).trained)
        chunks = -(-num_trained // train.steps_per_update)
    return train.updates_per_epoch * train.num_inner_epochs * chunks


def total_updates(config) -> int:
    """Return the optimizer steps of a whole run."""
    return config.num_epochs * updates_per_epoch(config)


def build(adapter: type[FlowModel], config, accelerator, plan: BatchPlan, folder) -> Run:
    """Load the data, the rewards and the model."""
    algorithm = registry.load(ALGORITHMS, config.algorithm)(config)
    backends.check(accelerator, config.mixed_precision)
    prompts, eval_prompts = (
        usable_prompts(adapter, config, split, accelerator) for split in ("train", "test")
    )
    if config.eval.num_prompts:
        eval_prompts = eval_prompts[: config.eval.num_prompts]
    with accelerator.local_main_process_first():  # one download a node
        model = adapter.load(config, accelerator.device)
    size = image_size(config)
    model.check_size(size)
    policy = Policy(model, config, accelerator, keeps=algorithm.weights)
    guided = max(config.sample.guidance_scale, config.eval.guidance_scale) > 1
    cache = PromptCache(
        model, policy.module, size=size, negative=model.negative if guided else None,
        max_size=config.sample.prompt_cache_size,
    )  # fmt: skip
    if config.sample.offload_text_encoders:
        both = (*prompts, *eval_prompts)
        images = [p.images for p in both] if model.max_images else None
        cache.fill([p.prompt for p in both], images)
        model.offload_text_encoders()
    rewards = RewardClient(
        reward_weights(config),
        device=str(accelerator.device),
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
    )
    return Run(
        config=config,
        accelerator=accelerator,
        plan=plan,
        folder=folder,
        model=model,
        policy=policy,
        algorithm=algorithm,
        prompts=prompts,
        eval_prompts=eval_prompts,
        prompt_cache=cache,
        rewards=rewards,
        weights={name: weight for name, weight in rewards.weights.items() if weight != 0},
    )


def main_process(accelerator, call):
    """Run `call` on the main process; what it raises there is a ValueError on every other one."""
    result, error = None, None
    if accelerator.is_main_process:
        try:
            result = call()
        except (ValueError, OSError) as caught:
            error = caught
    problem = [None if error is None else str(error)]
    broadcast_object_list(problem)
    if error is not None:
        raise error
    if problem[0] is not None:
        raise ValueError(problem[0])
    return result


def on_all(accelerator, call):
    """Run `call` on the main process and return its (picklable) result on every process."""
    result = [main_process(accelerator, call)]
    broadcast_object_list(result)
    return result[0]
