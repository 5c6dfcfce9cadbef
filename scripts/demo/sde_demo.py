"""Show one prompt over a grid of noise levels for every SDE: is the sampler right?

python scripts/demo/sde_demo.py --pretrained stabilityai/stable-diffusion-3.5-medium \\
    --resolution 512 --num_steps 10 --guidance_scale 4.5 --prompt 'a cat' --out sde_demo.png

At noise level 0 every SDE is the ODE, so its result must be the unpatched pipeline's; how far it
is from that is printed. Steps are stochastic but for the last, as in training.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from config.base import locked_config
from flow_grpo import registry, seeds
from flow_grpo.images import open_image
from flow_grpo.models.loading import quiet_libraries
from flow_grpo.prompt_cache import PromptCache
from flow_grpo.rollout import sample_trajectory
from flow_grpo.sde import SDES

MODELS = "flow_grpo.models"
CELL = 128  # least width and height of an image in the grid, pixels
MARGIN = (84, 20)  # left and top, for the labels


def main() -> int:
    """Write the grid and print the differences; exit code 2 for what a user can cause."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="sd3", help="a file of flow_grpo/models")
    parser.add_argument("--pretrained", default="flow_grpo/assets/tiny_sd3", help="or a hub id")
    parser.add_argument("--prompt", default='"FLOW" on a blue sign')
    parser.add_argument("--image", default="", help="file to edit, for models that take one")
    parser.add_argument("--noise_levels", default="0,0.3,0.7,1.0")
    parser.add_argument("--num_steps", type=int, default=8)
    parser.add_argument("--guidance_scale", type=float, default=1.0, help="1: no guidance")
    parser.add_argument("--resolution", type=int, default=64, help="height and width, pixels")
    parser.add_argument("--max_sequence_length", type=int, default=0, help="tokens; 0: no T5")
    parser.add_argument("--reference_resolution", type=int, default=1024, help="of --image")
    parser.add_argument("--num_frames", type=int, default=33, help="of a clip, by video models")
    parser.add_argument("--mixed_precision", default="no", help="no, fp16, bf16")
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
    levels = _noise_levels(args.noise_levels)
    if args.num_steps < 2:
        raise ValueError(
            f"--num_steps ({args.num_steps}) must be at least 2: the last has no noise"
        )
    if Path(args.out).suffix.lower() != ".png":
        raise ValueError(f"--out ({args.out}) must end in .png")
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = registry.load(MODELS, args.model).load(_config(args), device)
    size = (args.resolution, args.resolution)
    if bool(args.image) != bool(model.max_images):
        need = "needs" if model.max_images else "takes no"
        raise ValueError(f"--image ({args.image!r}): model {args.model} {need} reference image")
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


def _config(args: argparse.Namespace):
    """Return the settings that an adapter loads by."""
    config = locked_config()
    config.pretrained.model = args.pretrained
    config.mixed_precision = args.mixed_precision
    config.num_frames = args.num_frames
    config.reference_resolution = args.reference_resolution
    config.sample.max_sequence_length = args.max_sequence_length
    config.sample.guidance_scale = config.eval.guidance_scale = args.guidance_scale
    return config


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
