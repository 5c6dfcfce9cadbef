"""Keep the conditions of prompts in host memory, each encoded once."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from flow_grpo.images import content_digest, open_images
from flow_grpo.models.base import Cond, FlowModel


class PromptCache:
    """Encode every prompt once and keep the result in host memory, newest `max_size`."""

    def __init__(self, model: FlowModel, module, *, size, negative: str | None, max_size: int):
        self._model, self._module = model, module
        self._size, self._negative, self._max_size = size, negative, max_size
        self._conds: OrderedDict[tuple[str, tuple[str, ...]], Cond] = OrderedDict()
        self.num_encoded = 0  # forwards so far

    def __call__(
        self,
        prompts: Sequence[str],
        device: torch.device | str,
        images: Sequence[tuple[Path, ...]] | None = None,
    ) -> Cond:
        """Return the conditions of `prompts` on `device`, in order, repeats shared.

        `images` are the files of each prompt's reference images, for families that take them;
        files of one content are one image.
        """
        keyed = _keyed(prompts, images)
        place = {key: i for i, key in enumerate(dict(keyed))}
        cond = Cond.cat([self._one(key, paths) for key, paths in dict(keyed).items()]).to(device)
        return cond.index(torch.tensor([place[key] for key, _ in keyed], device=device))

    def fill(
        self, prompts: Sequence[str], images: Sequence[tuple[Path, ...]] | None = None
    ) -> None:
        """Encode all of `prompts` now and make room for them beside what is there."""
        keyed = dict(_keyed(prompts, images))
        self._max_size = max(self._max_size, len({*self._conds, *keyed}))
        for key, paths in keyed.items():
            self._one(key, paths)

    def _one(self, key: tuple[str, tuple[str, ...]], paths: tuple[Path, ...]) -> Cond:
        if key in self._conds:
            self._conds.move_to_end(key)
            return self._conds[key]
        images = [open_images(paths)] if paths else None
        with torch.no_grad():
            cond = self._model.encode(
                self._module, [key[0]], images, size=self._size, negative=self._negative
            )
        self.num_encoded += 1
        cond = self._sharing_storage(cond.to("cpu"))
        self._conds[key] = cond
        if len(self._conds) > self._max_size:
            self._conds.popitem(last=False)
        return cond

    def _sharing_storage(self, cond: Cond) -> Cond:
        """Let what equals the newest prompt's tensors (the negative's do) be those, no copies."""
        newest = self._conds[next(reversed(self._conds))].tensors if self._conds else {}
        shared = {name: old for name, old in newest.items() if torch.equal(old, cond[name])}
        return Cond(cond.tensors | shared)


def _keyed(prompts: Sequence[str], images: Sequence[tuple[Path, ...]] | None) -> list[tuple]:
    """Return ((prompt, contents of its images), their files) of each prompt."""
    files = [()] * len(prompts) if images is None else images
    return [
        ((prompt, tuple(map(content_digest, paths))), paths)
        for prompt, paths in zip(prompts, files, strict=True)
    ]
