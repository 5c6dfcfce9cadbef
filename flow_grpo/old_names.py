"""Translate the field names of yifan123/flow_grpo into this project's, once per run.

The reference states per-rank numbers (W ranks, b images a batch, nb batches, k images a prompt,
ga accumulated batches); here a preset states what they amount to: groups = W*b*nb/k and
updates = nb/ga (reference `config/grpo.py`, and the guide's "important hyper-parameters").
"""

from ml_collections import ConfigDict

RENAMED = {
    "train.algorithm": "algorithm",
    "sample.num_image_per_prompt": "sample.group_size",
    "sample.mini_num_image_per_prompt": "sample.mini_group_size",
    "sample.train_num_steps": "sample.sde_window_size",
    "sample.test_batch_size": "eval.batch_size",
    "sample.eval_num_steps": "eval.num_steps",
    "sample.eval_guidance_scale": "eval.guidance_scale",
    "train.beta": "train.kl_coef",  # but for DPO, whose beta is another one
    "train.clip_range_lt": "train.clip_range",
    "train.clip_range_gt": "train.clip_range_high",
    "train.ref_update_step": "train.old_update_freq",
}
BATCH_SIZES = ("sample.train_batch_size", "train.batch_size")
COUNTS = ("sample.num_batches_per_epoch", "train.gradient_accumulation_steps")
OLD_NAMES = (*RENAMED, *BATCH_SIZES, *COUNTS)


def translate_old_names(config: ConfigDict, world_size: int) -> dict[str, str]:
    """Write old fields that were given into the new ones, in place, and unset them.

    Returns:
        {old name: "new name = value"} for the log, empty if no old name was given.

    Raises:
        ValueError: the old numbers contradict each other or do not come out even.
    """
    given = {name: _get(config, name) for name in OLD_NAMES if _get(config, name) is not None}
    for name in (*BATCH_SIZES, *COUNTS, "sample.num_image_per_prompt"):
        if name in given and given[name] < 1:
            raise ValueError(f"{name} ({given[name]}) must be at least 1")
    messages = {}
    for old, new in RENAMED.items():
        if old in given:
            if old == "train.beta" and config.algorithm == "dpo":
                new = "train.dpo_beta"
            _set(config, new, given[old])
            messages[old] = f"{new} = {given[old]}"
    if "train.beta" in given and _has_the_true_kl(config):
        messages["train.beta"] += " (train.kl_scale=reference gives the KL its old value)"
    if any(name in given for name in (*BATCH_SIZES, *COUNTS, "sample.num_image_per_prompt")):
        _translate_batches(config, given, world_size, messages)
    for old in given:
        _set(config, old, None)
    if config.sample.sde_type == "sde":
        config.sample.sde_type = "flow_sde"
        messages["sample.sde_type = sde"] = "sample.sde_type = flow_sde"
    return messages


def _has_the_true_kl(config: ConfigDict) -> bool:
    """Return whether the KL is larger, by 1 / dt, than the one a published beta was made for."""
    steps = config.algorithm in ("grpo", "grpo_guard") and config.train.kl_scale == "true"
    return steps and config.sample.sde_type in ("sde", "flow_sde")


def _translate_batches(config, given, world_size, messages) -> None:
    sizes = {name: given[name] for name in BATCH_SIZES if name in given}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{' and '.join(f'{name} ({size})' for name, size in sizes.items())} differ; sampling "
            "and training use one batch size here (a model's output depends on it): set one of them"
        )
    batch_size = next(iter(sizes.values()), config.sample.batch_size)
    for name in sizes:
        messages[name] = f"sample.batch_size = {batch_size}"
    config.sample.batch_size = batch_size
    if any(name in given for name in (*BATCH_SIZES, *COUNTS)):
        num_batches = given.get("sample.num_batches_per_epoch")
        if num_batches is None:
            samples = config.sample.groups_per_epoch * config.sample.group_size
            num_batches = max(1, samples // (world_size * batch_size))
        _translate_counts(config, given, world_size, num_batches, messages)


def _translate_counts(config, given, world_size, num_batches, messages) -> None:
    """Derive groups_per_epoch and updates_per_epoch from per-rank counts."""
    batches_name, accumulation_name = COUNTS
    if batches_name in given:
        samples = world_size * config.sample.batch_size * num_batches
        groups, rest = divmod(samples, max(1, config.sample.group_size))  # 0 is refused later
        if rest or not groups:
            nearest = max(1, round(samples / config.sample.group_size))
            raise ValueError(
                f"{batches_name} ({num_batches}) * batch size ({config.sample.batch_size}) * "
                f"world_size ({world_size}) = {samples} images are no whole number of groups of "
                f"{config.sample.group_size}; set sample.groups_per_epoch instead, nearest valid: "
                f"{nearest}"
            )
        config.sample.groups_per_epoch = groups
        messages[batches_name] = f"sample.groups_per_epoch = {groups}"
    accumulation = given.get(accumulation_name)
    if accumulation is not None:
        if accumulation < 1 or num_batches % accumulation:
            divisors = [d for d in range(1, num_batches + 1) if num_batches % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - accumulation))
            raise ValueError(
                f"{accumulation_name} ({accumulation}) does not divide the {num_batches} batches "
                f"of an epoch; nearest valid: {nearest} (or set train.updates_per_epoch instead)"
            )
        config.train.updates_per_epoch = num_batches // accumulation
        messages[accumulation_name] = f"train.updates_per_epoch = {num_batches // accumulation}"


def _get(config, dotted):
    section, name = dotted.split(".")
    return config[section][name]


def _set(config, dotted, value) -> None:
    *section, name = dotted.split(".")
    (config[section[0]] if section else config)[name] = value
