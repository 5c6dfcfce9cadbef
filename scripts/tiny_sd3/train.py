"""Train the parts: first the VAE, then transformer and text encoders together by flow matching."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator

import torch
from tiny_sd3.build import VAE_FACTOR
from tiny_sd3.signs import Signs
from torch import Tensor
from torch.nn import functional

KL_WEIGHT = 1e-4  # per latent element, beside the mean error per pixel
DROP_CAPTIONS = 0.1
ZERO_TOKENS, ZERO_TOKENS_EVERY = 256, 10  # what the stock pipeline appends in place of T5


def autocast(device: torch.device):
    """Compute in bfloat16 on a GPU, in float32 elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def schedule(progress: float, warmup: float) -> float:
    """Return the learning rate's factor: linear warm-up, then linear decay to a twentieth."""
    return min((progress + 1e-3) / (warmup + 1e-3), 1.0 - 0.95 * progress)


def optimizer(parameters, learning_rate: float, device: torch.device):
    """Return AdamW, fused on a GPU."""
    fused = device.type == "cuda"
    return torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=fused
    )


def paced(num_steps: int, seconds: float) -> Iterator[tuple[int, float]]:
    """Yield (step, progress in [0, 1]) until the steps or the seconds are used up, the sooner."""
    start = time.monotonic()
    for step in range(1, num_steps + 1):
        spent = (time.monotonic() - start) / seconds
        if spent >= 1.0:
            return
        yield step, max((step - 1) / num_steps, spent)


def train_vae(image_coder, signs: Signs, *, steps, batch_size, learning_rate, seconds) -> float:
    """Train the VAE in place by absolute and squared error and a small KL.

    Returns the last mean absolute error, on images in [-1, 1].
    """
    device = signs.masks.device
    image_coder.train().requires_grad_(True)
    stepper = optimizer(image_coder.parameters(), learning_rate, device)
    for _, progress in paced(steps, seconds):
        for group in stepper.param_groups:
            group["lr"] = learning_rate * schedule(progress, 0.05)
        pixels = signs.pixels(torch.randint(signs.num, (batch_size,), device=device))
        with autocast(device):
            posterior = image_coder.encode(pixels).latent_dist
            decoded = image_coder.decode(posterior.sample()).sample
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean**2 + log_variance.exp() - 1.0 - log_variance).mean()
        error = functional.l1_loss(decoded.float(), pixels)
        squared = functional.mse_loss(decoded.float(), pixels)
        (error + squared + KL_WEIGHT * kl).backward()
        torch.nn.utils.clip_grad_norm_(image_coder.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    image_coder.eval().requires_grad_(False)
    return float(error.detach())


@torch.no_grad()
def encode_images(image_coder, signs: Signs, *, batch_size=1024) -> Tensor:
    """Return the latents' means, unscaled, of all signs; (n, channels, side, side) float32."""
    rows = torch.arange(signs.num, device=signs.masks.device)
    parts = rows.split(batch_size)
    return torch.cat([image_coder.encode(signs.pixels(p)).latent_dist.mean for p in parts])


def set_latent_scale(image_coder, latents: Tensor) -> None:
    """Write shift and scale into the VAE's config so that its latents have mean 0 and std 1."""
    image_coder.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=float(1.0 / latents.std())
    )


def encode_text(pipe, ids: Tensor, num_zero_tokens: int) -> tuple[Tensor, Tensor]:
    """Encode token ids as StableDiffusion3Pipeline.encode_prompt does, without T5.

    Returns embeddings (b, tokens + num_zero_tokens, joint width) and pooled (b, pooled width).
    """
    outputs = [
        encoder(ids, output_hidden_states=True)
        for encoder in (pipe.text_encoder, pipe.text_encoder_2)
    ]
    embeddings = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    missing = pipe.transformer.config.joint_attention_dim - embeddings.shape[-1]
    embeddings = functional.pad(embeddings, (0, missing, 0, num_zero_tokens))
    return embeddings, torch.cat([output.text_embeds for output in outputs], dim=-1)


def flow_loss(pipe, latents: Tensor, ids: Tensor, num_zero_tokens: int, shift: float) -> Tensor:
    """Return the mean squared error of the velocity (noise - x_0) at shifted uniform sigmas."""
    noise = torch.randn_like(latents)
    uniform = torch.rand(len(latents), device=latents.device)
    sigma = shift * uniform / (1.0 + (shift - 1.0) * uniform)
    x = torch.lerp(latents, noise, sigma[:, None, None, None])
    with autocast(latents.device):
        embeddings, pooled = encode_text(pipe, ids, num_zero_tokens)
        velocity = pipe.transformer(
            hidden_states=x,
            encoder_hidden_states=embeddings,
            pooled_projections=pooled,
            timestep=sigma * pipe.scheduler.config.num_train_timesteps,
            return_dict=False,
        )[0]
    return functional.mse_loss(velocity.float(), noise - latents)


def zero_gates(transformer) -> None:
    """Start every block as the identity and the output at zero (adaLN-Zero)."""
    linears = [transformer.proj_out, transformer.norm_out.linear]
    for block in transformer.transformer_blocks:
        linears += [block.norm1.linear, block.norm1_context.linear]
    for linear in linears:
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)


def trained_modules(pipe) -> tuple:
    """Return what flow matching trains."""
    return pipe.transformer, pipe.text_encoder, pipe.text_encoder_2


def averaged_copy(pipe):
    """Return a pipeline whose trained modules are copies, to hold the moving average."""
    copies = {}
    for name in ("transformer", "text_encoder", "text_encoder_2"):
        copies[name] = copy.deepcopy(getattr(pipe, name)).eval().requires_grad_(False)
    copied = type(pipe)(**{**pipe.components, **copies})
    copied.set_progress_bar_config(disable=True)
    return copied


def train_flow(
    pipe,
    signs: Signs,
    latents: Tensor,
    on_evaluate: Callable,
    *,
    steps,
    seconds,
    batch_size,
    learning_rate,
    ema_decay,
    evaluate_at: Callable[[int], bool],
):
    """Train by flow matching; latents are scaled, (n, channels, side, side).

    Calls on_evaluate(averaged pipeline, step, loss) where evaluate_at(step), and after the last.
    """
    device, shift = latents.device, pipe.scheduler.config.shift
    assert latents.shape[-1] == signs.masks.shape[-1] // VAE_FACTOR
    averaged = averaged_copy(pipe)
    parameters = [p for module in trained_modules(pipe) for p in module.train().parameters()]
    averages = [p for module in trained_modules(averaged) for p in module.parameters()]
    stepper = optimizer(parameters, learning_rate, device)
    smooth_loss, step, evaluated = None, 0, 0
    for step, progress in paced(steps, seconds):
        for group in stepper.param_groups:
            group["lr"] = learning_rate * schedule(progress, min(0.1, 200 / steps))
        with_zeros = step % ZERO_TOKENS_EVERY == 0
        num = max(1, batch_size // 4) if with_zeros else batch_size
        rows = torch.randint(signs.num, (num,), device=device)
        ids = signs.captions_of(rows, torch.rand(num, device=device) < DROP_CAPTIONS)
        loss = flow_loss(pipe, latents[rows].float(), ids, ZERO_TOKENS if with_zeros else 0, shift)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1.0 - min(ema_decay, step / (step + 10)))
        detached = loss.detach()
        smooth_loss = detached if smooth_loss is None else smooth_loss.lerp(detached, 0.05)
        if evaluate_at(step):
            on_evaluate(averaged, step, float(smooth_loss))
            evaluated = step
    if evaluated != step:
        on_evaluate(averaged, step, float(smooth_loss))
    return averaged
