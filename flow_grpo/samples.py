"""Write and read an evaluation's images: samples/epoch-000003/{000.png, ..., scores.json}.

A clip is one animated file, 000.webp, which browsers play. Beside an edited image lie those that it
was made from: 000_reference_0.jpg, ...
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flow_grpo.metrics import plain

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = re.compile(r"epoch-(\d+)")
FRAMES_PER_SECOND = 16  # of a clip; what Wan was trained on


def save_samples(
    run_dir: str | os.PathLike,
    epoch: int,
    images: "Tensor",
    prompts: Sequence[str],
    scores: dict[str, Sequence[float | None]],
    references: "Sequence[Sequence[Tensor]] | None" = None,
) -> Path:
    """Write the images and scores of one evaluation; return the folder, which appears whole.

    images: (n, 3, h, w) or clips (n, f, 3, h, w), float in [0, 1]. scores: {name: n values}, None
    or NaN where a reward gave none. references: of edited images, n sequences of (3, h', w'). An
    evaluation of the same epoch is replaced.
    Raises ValueError where the lengths differ.
    """
    lengths = {
        "prompts": len(prompts),
        **{f"scores[{name!r}]": len(s) for name, s in scores.items()},
        **({} if references is None else {"references": len(references)}),
    }
    for name, length in lengths.items():
        if length != len(images):
            raise ValueError(
                f"{name} has {length} entries for {len(images)} images; give one an image"
            )
    samples = Path(run_dir) / "samples"
    target = samples / f"epoch-{epoch:06d}"
    aside = samples / f".epoch-{epoch:06d}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    entries = []
    for i, image in enumerate(images):
        file = save_image(image, aside, f"{i:03d}")
        item = {name: plain(values[i]) for name, values in scores.items()}
        entry = {"file": file, "prompt": str(prompts[i]), "scores": item}
        if references is not None:
            entry["references"] = _save_references(
                references[i], aside, f"{i:03d}", max(images.shape[-2:])
            )
        entries.append(entry)
    (aside / "scores.json").write_text(
        json.dumps(entries, indent=1, allow_nan=False), encoding="utf-8"
    )
    if target.exists():
        old = samples / f".old-{target.name}-{os.getpid()}"
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)
    return target


def beside(references: "Sequence[Sequence[Tensor]]", images: "Tensor") -> "Tensor":
    """Return (n, 3, h, 2w): on the left of each image (3, h, w) its first reference, resized."""
    import torch

    from flow_grpo.rewards.base import reference_image

    left = [
        torch.from_numpy(reference_image(own[0], image).copy()).permute(2, 0, 1) / 255
        for own, image in zip(references, images, strict=True)
    ]
    return torch.cat([torch.stack(left), images], dim=-1)


def _pixels(images: "Tensor"):
    """Return images (..., 3, h, w), float, as (..., h, w, 3) uint8 on the CPU."""
    pixels = images.detach().float().nan_to_num(0).clamp(0, 1).mul(255).round().byte()
    return pixels.movedim(-3, -1).cpu().numpy()


def _save_references(references, folder: Path, stem: str, most: int) -> list[str]:
    """Write images (3, h, w), none larger than `most` pixels; return the files' names."""
    from PIL import Image

    names = [f"{stem}_reference_{place}.jpg" for place in range(len(references))]
    for name, reference in zip(names, references, strict=True):
        image = Image.fromarray(_pixels(reference))
        image.thumbnail((most, most))
        image.save(folder / name, quality=90)
    return names


def save_image(image: "Tensor", folder: Path, stem: str) -> str:
    """Write an image (3, h, w) or a clip (f, 3, h, w), float in [0, 1]; return the file's name."""
    from PIL import Image

    pixels = _pixels(image)
    if pixels.ndim == 3:
        Image.fromarray(pixels).save(folder / f"{stem}.png")
        return f"{stem}.png"
    first, *others = map(Image.fromarray, pixels)
    duration = round(1000 / FRAMES_PER_SECOND)
    first.save(
        folder / f"{stem}.webp", save_all=True, append_images=others, duration=duration, loop=0,
        quality=90,
    )  # fmt: skip
    return f"{stem}.webp"


def read_samples(run_dir: str | os.PathLike) -> dict[int, list[dict]]:
    """Return {epoch: entries} of the readable sample folders.

    An entry's "path" is its image's, its "references" those of the images it was made from.
    """
    found: dict[int, list[dict]] = {}
    for folder in sorted((Path(run_dir) / "samples").glob("epoch-*")):
        match = FOLDER.fullmatch(folder.name)
        if not match:
            continue
        try:
            entries = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(entries, list):
            continue
        good = [entry for entry in entries if isinstance(entry, dict) and "file" in entry]
        for entry in good:
            entry["path"] = _below(folder, entry["file"])
            entry["references"] = _references(folder, entry)
        found[int(match[1])] = good
    return dict(sorted(found.items()))


def _below(folder: Path, name) -> Path:
    return folder / Path(str(name)).name


def _references(folder: Path, entry: dict) -> list[Path]:
    names = entry.get("references")
    return [_below(folder, name) for name in names] if isinstance(names, list) else []
