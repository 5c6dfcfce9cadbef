"""Make images with a base model or an adapter, by the stock pipeline.

python scripts/sample.py --lora runs/quickstart/checkpoints/checkpoint-40 \\
    --prompt '"FLOW" on a blue sign'

Settings that are not given come from the config.yaml of the run that the adapter lies in, and
without one from the shipped small model.
"""

import argparse
import logging
import sys
from pathlib import Path

import diffusers
import torch
import yaml

from flow_grpo import lora, seeds
from flow_grpo.models.loading import (
    DTYPES,
    half_precision_dtype,
    model_index,
    quiet_libraries,
    resolve_model,
)
from flow_grpo.models.sd3 import MAX_T5_TOKENS, SD3

DEFAULTS = {
    "pretrained": "flow_grpo/assets/tiny_sd3",
    "revision": "main",
    "num_steps": 8,
    "guidance_scale": 1.0,
    "resolution": 64,
    "use_t5": True,
    "max_sequence_length": None,
}
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
    parser.add_argument("--num_images", type=int, default=4, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, help="denoising steps")
    parser.add_argument("--guidance_scale", type=float, help="1: no guidance")
    parser.add_argument("--resolution", type=int, help="height and width, pixels")
    parser.add_argument("--max_sequence_length", type=int, help="T5 tokens; without T5, padding")
    parser.add_argument("--batch_size", type=int, default=8, help="images in a forward")
    parser.add_argument("--mixed_precision", default="no", help=", ".join(DTYPES))
    parser.add_argument("--out", default="samples", help="folder")
    quiet_libraries()
    try:
        files = sample(parser.parse_args())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    print(f"{len(files)} images in {files[0].parent}: {files[0].name} ... {files[-1].name}")
    return 0


def sample(args: argparse.Namespace) -> list[Path]:
    """Write `{prompt:03d}_{image:02d}.png`; an image depends on seed, prompt and place only."""
    prompts = _prompts(args)
    settings = DEFAULTS | (_settings_of_run(Path(args.lora)) if args.lora else {})
    given = {name: getattr(args, name, None) for name in DEFAULTS}
    settings |= {name: value for name, value in given.items() if value is not None}
    for name, value in {**vars(args), **settings}.items():
        if name in ("num_images", "batch_size", "num_steps") and value < 1:
            raise ValueError(f"--{name} ({value}) must be at least 1")
    pipeline = load(settings, half_precision_dtype(args.mixed_precision))
    if args.lora:
        attach(pipeline, args.lora)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    pipeline.set_progress_bar_config(disable=True)
    folder, files = Path(args.out), []
    folder.mkdir(parents=True, exist_ok=True)
    for place, prompt in enumerate(prompts):
        for start in range(0, args.num_images, args.batch_size):
            members = range(start, min(start + args.batch_size, args.num_images))
            images = pipeline(
                [prompt] * len(members),
                height=settings["resolution"],
                width=settings["resolution"],
                num_inference_steps=settings["num_steps"],
                guidance_scale=settings["guidance_scale"],
                max_sequence_length=settings["max_sequence_length"],
                generator=[
                    seeds.generator(args.seed, seeds.EVAL_NOISE, group=place, member=member)
                    for member in members
                ],
            ).images
            for member, image in zip(members, images):
                files.append(folder / f"{place:03d}_{member:02d}.png")
                image.save(files[-1])
    return files


def load(settings: dict, dtype: torch.dtype):
    """Return the stock pipeline; fill in the T5 tokens: none without T5, else 128.

    Raises:
        ValueError: no such model, another family's, or a resolution that it cannot do.
    """
    path = resolve_model(settings["pretrained"])
    index = model_index(path, settings["revision"], expected=SD3.pipeline_class)
    with_t5 = settings["use_t5"] and index.get("text_encoder_3", [None])[0] is not None
    if settings["max_sequence_length"] is None:
        settings["max_sequence_length"] = 128 if with_t5 else 0
    if not 0 <= settings["max_sequence_length"] <= MAX_T5_TOKENS:
        raise ValueError(
            f"--max_sequence_length ({settings['max_sequence_length']}) must be in "
            f"[0, {MAX_T5_TOKENS}]"
        )
    with_t5 = with_t5 and settings["max_sequence_length"] > 0  # as in training
    absent = {} if with_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(
        path, revision=settings["revision"], dtype=dtype, **absent
    )
    unit = pipeline.vae_scale_factor * pipeline.patch_size
    nearest = max(1, round(settings["resolution"] / unit)) * unit
    if settings["resolution"] != nearest:
        raise ValueError(
            f"--resolution ({settings['resolution']}) must be a multiple of {unit}; "
            f"nearest valid: {nearest}"
        )
    return pipeline


def attach(pipeline, path: str) -> None:
    """Load an adapter, or the `transformer/` of a checkpoint of full training."""
    trained = [folder for folder in (Path(path) / "transformer", Path(path)) if _is_model(folder)]
    if trained:
        kind, dtype = type(pipeline.transformer), pipeline.transformer.dtype
        pipeline.transformer = kind.from_pretrained(trained[0], dtype=dtype)
    else:
        lora.attach(pipeline, path)


def _is_model(folder: Path) -> bool:
    return (folder / "diffusion_pytorch_model.safetensors").is_file()


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompt_file:
        lines = Path(args.prompt_file).read_text(encoding="utf-8").splitlines()
        prompts += [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT or --prompt_file FILE, a prompt a line")
    return prompts


def _settings_of_run(path: Path) -> dict:
    """Return the settings of the run that an adapter lies in; none if it lies in no run."""
    path = path.resolve()
    for folder in (path, *path.parents)[: PARENTS_OF_AN_ADAPTER + 1]:
        if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            return {
                "pretrained": config["pretrained"]["model"],
                "revision": config["pretrained"]["revision"],
                "use_t5": config["pretrained"]["use_t5"],
                "num_steps": config["eval"]["num_steps"],
                "guidance_scale": config["eval"]["guidance_scale"],
                "resolution": config["resolution"],
                "max_sequence_length": config["sample"]["max_sequence_length"],
            }
    return {}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
