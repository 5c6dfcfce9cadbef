"""Make images, or clips, with a base model or an adapter, by the stock pipeline.

python scripts/sample.py --lora runs/quickstart/checkpoints/checkpoint-40 \\
    --prompt '"FLOW" on a blue sign'

The model family is that of the pipeline. Settings that are not given come from the config.yaml of
the run that the adapter lies in; without a run from what the family wants (config/models.py), and
without --pretrained too from the shipped small model.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml

from config import models
from config.base import locked_config
from flow_grpo import lora, seeds
from flow_grpo.images import open_image
from flow_grpo.models.loading import DTYPES, adapter_name, quiet_libraries
from flow_grpo.registry import load
from flow_grpo.samples import save_image
from flow_grpo.settings import image_size

OVERRIDES = {  # command line: field
    "pretrained": "pretrained.model",
    "num_steps": "eval.num_steps",
    "guidance_scale": "eval.guidance_scale",
    "resolution": "resolution",
    "width": "width",
    "reference_resolution": "reference_resolution",
    "num_frames": "num_frames",
    "max_sequence_length": "sample.max_sequence_length",
    "mixed_precision": "mixed_precision",
}
OF_A_RUN = (*OVERRIDES.values(), "pretrained.revision", "pretrained.use_t5")
PARENTS_OF_AN_ADAPTER = 4  # RUN/checkpoints/checkpoint-N/lora/FILE lies that deep in its run


def main() -> int:
    """Write the images and say where they lie; exit code 2 for what a user can cause."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pretrained", help="base model: folder or hub id")
    parser.add_argument(
        "--lora", help="checkpoint folder, LoRA file or folder (diffusers or PEFT); none: base"
    )
    parser.add_argument("--prompt", action="append", default=[], help="may be repeated")
    parser.add_argument("--prompt_file", help="text file, a prompt a line")
    parser.add_argument(
        "--image", action="append", default=[], help="to edit; repeated for models that take more"
    )
    parser.add_argument("--num_images", type=int, default=4, help="or clips, of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, help="denoising steps")
    parser.add_argument("--guidance_scale", type=float, help="1: no guidance")
    parser.add_argument("--resolution", type=int, help="height, and width if not given; pixels")
    parser.add_argument("--width", type=int, help="pixels")
    parser.add_argument("--reference_resolution", type=int, help="of --image; Qwen-Image-Edit")
    parser.add_argument("--num_frames", type=int, help="of a clip, by video models")
    parser.add_argument("--max_sequence_length", type=int, help="tokens; SD3: of T5, 0 without it")
    parser.add_argument("--batch_size", type=int, default=8, help="images in a forward")
    parser.add_argument(
        "--mixed_precision", help=f"{', '.join(DTYPES)}; default: no, or the run's on a GPU"
    )
    parser.add_argument("--out", default="samples", help="folder")
    quiet_libraries()
    try:
        files = sample(parser.parse_args())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    kind = "clips" if files[0].suffix == ".webp" else "images"
    print(f"{len(files)} {kind} in {files[0].parent}: {files[0].name} ... {files[-1].name}")
    return 0


@torch.no_grad()
def sample(args: argparse.Namespace) -> list[Path]:
    """Write `{prompt:03d}_{image:02d}.png`; an image depends on seed, prompt and place only."""
    prompts = _prompts(args)
    config, adapter = settings(args)
    for name, value in {**vars(args), "num_steps": config.eval.num_steps}.items():
        if name in ("num_images", "batch_size", "num_steps") and value < 1:
            raise ValueError(f"--{name} ({value}) must be at least 1")
    images = _references(args.image, adapter)
    model = adapter.load(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    size = image_size(config)
    model.check_size(size)
    if args.lora:
        attach(model.pipeline, args.lora)
    folder, files = Path(args.out), []
    folder.mkdir(parents=True, exist_ok=True)
    for place, prompt in enumerate(prompts):
        for members, noise in _noises(args, model.latent_shape(size), place):
            num = len(members)
            final = model.stock(
                [prompt] * num,
                model.initial_latents(num, size, noise.to(model.device)),
                [images] * num if images else None,
                size=size,
                num_steps=config.eval.num_steps,
                guidance_scale=config.eval.guidance_scale,
            )
            for member, image in zip(members, model.decode(final), strict=True):
                files.append(folder / save_image(image, folder, f"{place:03d}_{member:02d}"))
    return files


def settings(args: argparse.Namespace) -> tuple:
    """Return (configuration, adapter class) that the command line and the run ask for.

    Raises:
        ValueError: no such model, or one of no family that there is.
    """
    config = locked_config()
    run = _config_of_run(Path(args.lora)) if args.lora else {}
    if run:
        _set(config, {name: _get(run, name) for name in OF_A_RUN})
    elif args.pretrained is None:
        models.tiny_sd3(config)
    if args.pretrained is not None:
        config.pretrained.model = args.pretrained
    name = adapter_name(config.pretrained.model, config.pretrained.revision)
    if not run and args.pretrained is not None:
        getattr(models, name)(config)
    if not torch.cuda.is_available():
        config.mixed_precision = "no"
    _set(config, {field: getattr(args, given) for given, field in OVERRIDES.items()})
    config.sample.guidance_scale = config.eval.guidance_scale
    if args.resolution is not None and args.width is None:
        config.width = 0
    return config, load("flow_grpo.models", name)


def attach(pipeline, path: str) -> None:
    """Load an adapter, or the `transformer/` of a checkpoint of full training."""
    trained = [folder for folder in (Path(path) / "transformer", Path(path)) if _is_model(folder)]
    if trained:
        old = pipeline.transformer
        new = type(old).from_pretrained(trained[0], dtype=old.dtype).to(old.device)
        pipeline.transformer = new.requires_grad_(False).eval()
    else:
        lora.attach(pipeline, path)


def _is_model(folder: Path) -> bool:
    return any(folder.glob("diffusion_pytorch_model*.safetensors"))


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompt_file:
        lines = Path(args.prompt_file).read_text(encoding="utf-8").splitlines()
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt_file FILE, a prompt a line")
    return prompts


def _references(files: list[str], adapter: type) -> tuple:
    """Return the images to edit; raise ValueError for a number that the family does not take."""
    most = adapter.max_images
    if len(files) > most or (most and not files):
        takes = f"1 to {most}" if most > 1 else most or "no"
        raise ValueError(f"--image: {adapter.__name__} takes {takes}, and {len(files)} were given")
    return tuple(open_image(Path(file)) for file in files)


def _noises(args: argparse.Namespace, shape: tuple, place: int) -> Iterator[tuple[range, object]]:
    """Yield (members, their noise (n, *shape)) of a prompt, a batch at a time."""
    for start in range(0, args.num_images, args.batch_size):
        members = range(start, min(start + args.batch_size, args.num_images))
        yield members, torch.stack([
            seeds.normal(shape, args.seed, seeds.EVAL_NOISE, group=place, member=member)
            for member in members
        ])  # fmt: skip


def _config_of_run(path: Path) -> dict:
    """Return the configuration of the run that an adapter lies in; {} if it lies in no run."""
    path = path.resolve()
    for folder in (path, *path.parents)[: PARENTS_OF_AN_ADAPTER + 1]:
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return {}


def _get(config: dict, dotted: str):
    """Return a field of a run's configuration; None if the run is older than the field."""
    section, _, name = dotted.rpartition(".")
    return (config[section] if section else config).get(name)


def _set(config, values: dict) -> None:
    """Set {dotted name: value}, leaving out what is None."""
    config.update_from_flattened_dict({k: v for k, v in values.items() if v is not None})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
