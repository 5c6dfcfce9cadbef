"""Write and read an evaluation's images: samples/epoch-000003/{000.png, ..., scores.json}.

A clip is one animated file, 000.webp, which browsers play.
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
) -> Path:
    """Write the images and scores of one evaluation; return the folder, which appears whole.

    images: (n, 3, h, w) or clips (n, f, 3, h, w), float in [0, 1]. scores: {name: n values}, None
    or NaN where a reward gave none. An evaluation of the same epoch is replaced.
    Raises ValueError where the lengths differ.
    """
    lengths = {
        "prompts": len(prompts),
        **{f"scores[{name!r}]": len(s) for name, s in scores.items()},
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
        entries.append({"file": file, "prompt": str(prompts[i]), "scores": item})
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


def save_image(image: "Tensor", folder: Path, stem: str) -> str:
    """Write an image (3, h, w) or a clip (f, 3, h, w), float in [0, 1]; return the file's name."""
    from PIL import Image

    pixels = image.detach().float().nan_to_num(0).clamp(0, 1).mul(255).round().byte()
    pixels = pixels.movedim(-3, -1).cpu().numpy()
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
    """Return {epoch: entries} of the readable sample folders; an entry's "path" is its image's."""
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
        found[int(match[1])] = [
            {**entry, "path": folder / Path(str(entry["file"])).name} for entry in good
        ]
    return dict(sorted(found.items()))
