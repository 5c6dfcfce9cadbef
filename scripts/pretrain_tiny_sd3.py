"""Train a small StableDiffusion3Pipeline from nothing and save it as a diffusers folder.

    python scripts/pretrain_tiny_sd3.py --out OUT --hidden 160 --layers 5 --heads 5

OUT gets evaluations.jsonl, a sample grid per snapshot, and a folder OUT/step-XXXXXX for each of the
--keep snapshots whose held-out OCR reward is nearest to --target. Uses a GPU where there is one.
"""

import argparse
import os
import sys
import time
from pathlib import Path

RESERVE_S = 25.0  # of --max_minutes, for the last evaluations


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write; must be empty or absent")
    add("--hidden", type=int, default=160)
    add("--layers", type=int, default=5)
    add("--heads", type=int, default=5)
    add("--steps", type=int, default=3000, help="flow-matching steps")
    add("--batch_size", type=int, default=1024)
    add("--learning_rate", type=float, default=1e-3)
    add("--ema_decay", type=float, default=0.997)
    add("--shift", type=float, default=3.0, help="of sigmas, in training and sampling")
    add("--num_images", type=int, default=200_000)
    add("--wrong_captions", type=float, default=0.1, help="share of captions of other words")
    add("--wrong_letters", type=float, default=0.0, help="share of replaced letters in the rest")
    add("--vae_channels", type=int, nargs=3, default=(16, 32, 64))
    add("--vae_steps", type=int, default=2000)
    add("--vae_batch_size", type=int, default=256)
    add("--vae_learning_rate", type=float, default=2e-3)
    add("--vae_minutes", type=float, default=1.5, help="at most")
    add("--vae_from", type=Path, help="take the VAE of this pipeline folder, train none")
    add("--init_from", type=Path, help="go on from this pipeline folder, VAE included")
    add("--max_minutes", type=float, default=9.0, help="of the whole run, saving included")
    add("--evaluate_every", type=int, default=200, help="steps between snapshots")
    add("--evaluate_from", type=int, default=0, help="no snapshot before this step")
    add("--evaluation_prompts", type=int, default=128)
    add("--keep", type=int, default=4, help="number of snapshots to keep")
    add("--target", type=float, default=0.55, help="reward the kept snapshots are nearest to")
    add("--ocr_workers", type=int, default=min(8, os.cpu_count() or 1))
    add("--seed", type=int, default=0)
    add("--compile", action="store_true", help="compile the transformer for training")
    args = parser.parse_args()
    args.vae_from = args.init_from or args.vae_from
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out {args.out} is not empty; name a new folder")
    return args


def make_vae(args, signs) -> tuple:
    """Train or load the VAE and set its latent scale; return (vae, what was done, latents)."""
    import torch
    from diffusers import AutoencoderKL
    from tiny_sd3 import build, train

    device, start = signs.masks.device, time.monotonic()
    if args.vae_from:
        image_coder = AutoencoderKL.from_pretrained(args.vae_from, subfolder="vae").to(device)
        image_coder.register_to_config(_name_or_path="")  # of this machine
        note = "taken from an earlier run of this script."
    else:
        image_coder = build.vae(tuple(args.vae_channels)).to(device)
        error = train.train_vae(
            image_coder,
            signs,
            steps=args.vae_steps,
            batch_size=args.vae_batch_size,
            learning_rate=args.vae_learning_rate,
            seconds=60 * args.vae_minutes,
        )
        note = (
            f"at most {args.vae_steps:,} steps of {args.vae_batch_size}, absolute and squared "
            f"error and a small KL; mean absolute error {error / 2:.4f} of the brightness range."
        )
        image_coder.to(torch.float16).to(torch.float32)  # as it will be saved
    latents = train.encode_images(image_coder, signs)
    if not args.vae_from:
        train.set_latent_scale(image_coder, latents)
    config = image_coder.config
    latents = ((latents - config.shift_factor) * config.scaling_factor).to(torch.float16)
    print(f"VAE ready after {time.monotonic() - start:.0f} s: {note}", flush=True)
    return image_coder, note, latents


def check_encoding(pipe, prompts: list[str]) -> None:
    """Stop unless training encodes prompts exactly as the pipeline does."""
    import torch
    from tiny_sd3 import signs, train

    with torch.no_grad():
        ids = signs.token_ids(pipe.tokenizer, prompts).to(pipe.device)
        ours = train.encode_text(pipe, ids, 0)
        theirs = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=0
        )
    for mine, reference in zip(ours, (theirs[0], theirs[2]), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def finish(args, evaluator, pipe, note: str) -> None:
    """Choose the snapshots, measure them from their files, and write their cards."""
    import torch
    from tiny_sd3 import card

    on_gpu = pipe.device.type == "cuda"
    hardware = f"one {torch.cuda.get_device_name()}" if on_gpu else "a CPU"
    kept = evaluator.keep_nearest(args.target, args.keep)
    facts = {**vars(args), "vae_text": note, "hardware": hardware, "torch": torch.__version__}
    facts |= {"num_prompts": args.evaluation_prompts, "before": card.history(args.init_from)}
    facts |= {"command": " ".join(["python scripts/pretrain_tiny_sd3.py", *sys.argv[1:]])}
    print("kept, measured from their files:", flush=True)
    for record in kept:
        folder = args.out / f"step-{record['step']:06d}"
        measured = evaluator.measure_saved(folder, pipe.device)
        minutes = record["seconds"] / 60
        card.write(folder, pipe, {**facts, **measured, "step": record["step"], "minutes": minutes})
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
        print(f"{folder}: {size:.1f} MB, {numbers}", flush=True)


def main() -> None:
    """Run the whole training; see the module's docstring."""
    args, start = parse_args(), time.monotonic()
    import diffusers
    import torch
    import transformers
    from tiny_sd3 import build, evaluate, signs

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = signs.Signs(
        args.num_images,
        build.tokenizer(),
        device,
        seed=args.seed,
        wrong_captions=args.wrong_captions,
        wrong_letters=args.wrong_letters,
    )
    print(f"{args.num_images} images drawn after {time.monotonic() - start:.0f} s", flush=True)
    evaluator = evaluate.Evaluator(
        args.out, num_prompts=args.evaluation_prompts, num_workers=args.ocr_workers, start=start
    )
    try:
        pretrain(args, data, evaluator, start)
    finally:
        evaluator.reader.close()


def pretrain(args, data, evaluator, start: float) -> None:
    """Train the VAE, then the rest, and finish; start is the run's time.monotonic()."""
    from tiny_sd3 import build, train

    image_coder, note, latents = make_vae(args, data)
    ceiling = evaluator.measure_reconstruction(image_coder)
    print(f"OCR reward of the VAE's reconstructions of held-out signs: {ceiling:.3f}", flush=True)
    shape = {"hidden": args.hidden, "layers": args.layers, "heads": args.heads}
    pipe = build.pipeline(image_coder, shift=args.shift, **shape)
    if args.init_from:
        started = build.load(args.init_from)
        for name in ("transformer", "text_encoder", "text_encoder_2"):
            getattr(pipe, name).load_state_dict(getattr(started, name).state_dict())
    else:
        train.zero_gates(pipe.transformer)
    pipe = pipe.to(data.masks.device)
    check_encoding(pipe, [*evaluator.prompts[:4], ""])
    if args.compile:
        pipe.transformer.compile()
    train.train_flow(
        pipe,
        data,
        latents,
        evaluator,
        steps=args.steps,
        seconds=60 * args.max_minutes - RESERVE_S - (time.monotonic() - start),
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        ema_decay=args.ema_decay,
        evaluate_at=lambda step: step % args.evaluate_every == 0 and step >= args.evaluate_from,
    )
    finish(args, evaluator, pipe, note)


if __name__ == "__main__":
    sys.exit(main())
