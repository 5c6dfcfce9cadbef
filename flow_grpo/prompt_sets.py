"""Choose what a run can use of a prompt set: what its rewards score and its family can be given."""

import logging

from accelerate.utils import gather_object

from flow_grpo import registry
from flow_grpo.data import Prompt, load_prompts
from flow_grpo.images import check_counts, with_readable_images
from flow_grpo.models.base import FlowModel
from flow_grpo.settings import reward_weights

logger = logging.getLogger(__name__)

REWARDS = "flow_grpo.rewards"


def usable_prompts(adapter: type[FlowModel], config, split: str, accelerator=None) -> list[Prompt]:
    """Load a split and drop the prompts to which no weighted reward applies, saying how many.

    For families that edit images, every reference image is decoded once: by one of the
    `accelerator`'s processes, which all learn the outcome, or by this one.

    Raises:
        ValueError: none is left, or a prompt's reference images are not as the family needs them.
    """
    prompts = _scorable(load_prompts(config.dataset, split, config.prompt_fn), config, split)
    if not adapter.max_images:
        if any(prompt.images for prompt in prompts):
            logger.warning(
                "%s takes no reference images: those of %s are not used",
                adapter.__name__, config.dataset,
            )  # fmt: skip
        return prompts
    check_counts(prompts, adapter.__name__, adapter.max_images)
    if accelerator is None:
        return with_readable_images(prompts, config.unreadable_images)
    share = slice(accelerator.process_index, None, accelerator.num_processes)
    return with_readable_images(
        prompts, config.unreadable_images, share=share, gathered=gather_object
    )


def _scorable(prompts: list[Prompt], config, split: str) -> list[Prompt]:
    """Return the prompts to which a weighted reward applies; raise ValueError if none is left."""
    applies = [False] * len(prompts)
    names = [name for name, weight in reward_weights(config).items() if weight != 0]
    for name in names:
        check = getattr(registry.load(REWARDS, name), "check_prompts", None)
        found = check([p.prompt for p in prompts]) if check else [True] * len(prompts)
        if not any(found) and len(names) > 1:
            logger.warning(
                "reward %s applies to none of the %d %s prompts of %s",
                name, len(prompts), split, config.dataset,
            )  # fmt: skip
        applies = [a or b for a, b in zip(applies, found, strict=True)]
    kept = [prompt for prompt, usable in zip(prompts, applies, strict=True) if usable]
    if not kept:
        raise ValueError(
            f"none of the {len(prompts)} {split} prompts of {config.dataset} can be scored by "
            f"{', '.join(names)} (the ocr reward needs a quoted text in the prompt, as those of "
            "--config.dataset=dataset/ocr --config.prompt_fn=general_ocr have)"
        )
    if len(kept) < len(prompts):
        logger.warning(
            "%d of %d %s prompts of %s cannot be scored by %s and are left out",
            len(prompts) - len(kept), len(prompts), split, config.dataset, ", ".join(names),
        )  # fmt: skip
    return kept
