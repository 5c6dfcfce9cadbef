"""Show one prompt over a grid of noise levels for every SDE: is the sampler right?

python scripts/demo/sde_demo.py --pretrained stabilityai/stable-diffusion-3.5-medium \\
    --prompt 'a cat' --out sde_demo.png

At noise level 0 every SDE is the ODE, so its result must be the unpatched pipeline's; how far it
is from that is printed. Steps are stochastic but for the last, as in training.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from config import models
from config.base import locked_config
from flow_grpo import registry, seeds
from flow_grpo.images import open_image
from flow_grpo.models.loading import adapter_name, quiet_libraries
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDES
from flow_grpo.settings import image_size

MODELS = "flow_grpo.models"
FIELDS = {  # command line: field
    "num_steps": "sample.num_steps",
    "guidance_scale": "sample.guidance_scale",
    "resolution": "resolution",
    "width": "width",
    "max_sequence_length": "sample.max_sequence_length",
    "reference_resolution": "reference_resolution",
    "num_frames": "num_frames",
    "mixed_precision": "mixed_precision",
}
CELL = 128  # least width and height of an image in the grid, pixels
MARGIN = (84, 20)  # left and top, for the labels


def main() -> int:
    """Write the grid and print the differences; exit code 2 for what a user can cause."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pretrained", help="folder or hub id; none: the shipped small SD3")
    parser.add_argument("--model", help="a file of flow_grpo/models; default: the pipeline's")
    parser.add_argument("--prompt", default='"FLOW" on a blue sign')
    parser.add_argument("--image", default="", help="file to edit, for models that take one")
    parser.add_argument("--noise_levels", default="0,0.3,0.7,1.0")
    own = parser.add_argument_group("what config/models.py says of the family, if not given")
    own.add_argument("--num_steps", type=int)
    own.add_argument("--guidance_scale", type=float, help="1: no guidance")
    own.add_argument("--resolution", type=int, help="height, and width if not given; pixels")
    own.add_argument("--width", type=int, help="pixels")
    own.add_argument("--max_sequence_length", type=int, help="tokens; SD3: of T5, 0 without it")
    own.add_argument("--reference_resolution", type=int, help="of --image; Qwen-Image-Edit")
    own.add_argument("--num_frames", type=int, help="of a clip, by video models")
    own.add_argument("--mixed_precision", help="no, fp16, bf16; without a GPU: no")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="sde_demo.png", help="PNG file")
    quiet_libraries()
    try:
        demo(parser.parse_args())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 2
    return 0


@torch.no_grad()
def demo(args: argparse.Namespace) -> None:
    """Sample every SDE at every noise level from the same noise."""
    levels, (config, name) = _noise_levels(args.noise_levels), _settings(args)
    args.num_steps, args.guidance_scale = config.sample.num_steps, config.sample.guidance_scale
    if args.num_steps < 2:
        raise ValueError(
            f"--num_steps ({args.num_steps}) must be at least 2: the last has no noise"
        )
    if Path(args.out).suffix.lower() != ".png":
        raise ValueError(f"--out ({args.out}) must end in .png")
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter, size = registry.load(MODELS, name), image_size(config)
    if bool(args.image) != bool(adapter.max_images):
        need = "needs a" if adapter.max_images else "takes no"
        raise ValueError(f"--image ({args.image!r}): model {name} {need} reference image")
    model = adapter.load(config, device)
    model.check_size(size)
    noise = seeds.normal((1, *model.latent_shape(size)), args.seed, seeds.INITIAL_NOISE)
    x = model.initial_latents(1, size, noise.to(device))
    finals = _finals(args, model, size, x)
    images = [(open_image(Path(args.image)),)] if args.image else None
    stock = model.stock(
        [args.prompt],
        x,
        images,
        size=size,
        num_steps=args.num_steps,
        guidance_scale=args.guidance_scale,
    )
    for name in SDES:
        final = finals(name, 0.0)
        print(
            f"noise 0, {name}: largest difference to the unpatched pipeline "
            f"{(final - stock).abs().max():.1e} (latents), "
            f"{(model.decode(final) - model.decode(stock)).abs().max():.1e} (pixels in [0, 1])"
        )
    rows = {name: [_picture(model, finals(name, level)) for level in levels] for name in SDES}
    grid(rows, levels).save(args.out)
    print(f"rows {', '.join(SDES)}; columns noise level {args.noise_levels}: {args.out}")


def _finals(args: argparse.Namespace, model, size: tuple[int, int], x):
    """Return the function (SDE, noise level) -> x_0 of the prompt."""
    guided = args.guidance_scale > 1
    negative = model.negative if guided else None
    cache = PromptCache(model, model.transformer, size=size, negative=negative, max_size=1)
    cond = cache([args.prompt], x.device, [(Path(args.image),)] if args.image else None)
    sigmas = model.sigmas(args.num_steps, size)
    stochastic = range(args.num_steps - 1)
    noises = [seeds.normal(x.shape, args.seed, seeds.STEP_NOISE, t=t) for t in stochastic]

    def velocity(x, sigma, *, replay):
        return model.velocity(model.transformer, x, sigma, cond, args.guidance_scale)

    def final(name: str, noise_level: float):
        return sample_trajectory(
            velocity,
            x,
            sigmas,
            sde=SDES[name],
            noise_level=noise_level,
            stochastic=stochastic,
            noises=torch.stack(noises, 1).to(x.device),
        ).final

    return final


def _picture(model, x):
    """Return the image of x_0 (1, *latent); of a clip the middle frame."""
    image = model.decode(x)[0]
    return image if image.ndim == 3 else image[len(image) // 2]


def grid(rows: dict[str, list], levels: list[float]) -> Image.Image:
    """Return one labelled picture of images (3, h, w) in [0, 1]: a row an SDE."""
    height, width = next(iter(rows.values()))[0].shape[1:]
    scale = max(1, -(-CELL // min(height, width)))
    height, width = height * scale, width * scale
    picture = Image.new(
        "RGB", (MARGIN[0] + width * len(levels), MARGIN[1] + height * len(rows)), "white"
    )
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default()
    for column, level in enumerate(levels):
        draw.text((MARGIN[0] + column * width + 4, 4), f"noise {level:g}", "black", font)
    for row, (name, images) in enumerate(rows.items()):
        top = MARGIN[1] + row * height
        draw.text((4, top + height // 2), name, "black", font)
        for column, image in enumerate(images):
            pixels = (image.permute(1, 2, 0) * 255).round().byte().cpu().numpy()
            cell = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
            picture.paste(cell, (MARGIN[0] + column * width, top))
    return picture


def _noise_levels(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 <= level < float("inf") for level in levels):
        raise ValueError(f"--noise_levels ({text}) must be numbers from 0 on, such as 0,0.3,0.7,1")
    return levels


def _settings(args: argparse.Namespace) -> tuple:
    """Return (the settings that an adapter loads and samples by, its file's name)."""
    config = locked_config()
    if args.pretrained is None:
        models.tiny_sd3(config)
        name = args.model or "sd3"
        registry.load(MODELS, name)  # for its message about an unknown one
    else:
        name = args.model or adapter_name(args.pretrained, config.pretrained.revision)
        registry.load(MODELS, name)
        getattr(models, name)(config)
        config.pretrained.model = args.pretrained
    if not torch.cuda.is_available():
        config.mixed_precision = "no"
    given = {field: getattr(args, key) for key, field in FIELDS.items()}
    config.update_from_flattened_dict({k: v for k, v in given.items() if v is not None})
    if args.resolution is not None and args.width is None:
        config.width = 0
    config.eval.guidance_scale = config.sample.guidance_scale
    return config, name


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
