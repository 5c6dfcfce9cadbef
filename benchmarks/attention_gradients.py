"""Compare the gradients and the speed of cuDNN's attention with the other kernels', on one GPU.

    python benchmarks/attention_gradients.py

A gradient comes contiguous, as through a projection, or as a slice, as through a concatenation of
attention and feed-forward (FLUX's single blocks). In every order, each in a process of its own:
what runs first decides which backward PyTorch keeps for the shape, and a wrong one may end in an
illegal memory access.
"""

import argparse
import subprocess
import sys
import time

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Of the presets: batch (twice where guidance doubles it), tokens, heads, width, dtype, masked.
SHAPES = {
    "flux": (3, 1152, 24, 128, torch.bfloat16, False),
    "flux_kontext": (3, 2176, 24, 128, torch.bfloat16, False),
    "sd3": (16, 1229, 24, 64, torch.float16, False),
    "wan2_1": (16, 3510, 12, 128, torch.bfloat16, False),
    "qwenimage": (8, 1280, 24, 128, torch.bfloat16, True),
}
ORDERS = (("contiguous", "slice"), ("slice", "contiguous"))
DEVICE = "cuda"
WIDER = 5  # attention and feed-forward together, in widths of the attention
REPEAT = 10


class Problem:
    """Hold one shape's inputs."""

    def __init__(self, name: str):
        batch, tokens, heads, width, dtype, masked = SHAPES[name]
        kind = {"device": DEVICE, "dtype": dtype}
        torch.manual_seed(0)
        self.inputs = [
            torch.randn(batch, tokens, heads, width, **kind).requires_grad_() for _ in range(3)
        ]
        wide = torch.randn(batch, tokens, WIDER * heads * width, **kind)
        part = wide[..., : heads * width]
        self.gradients = {"contiguous": part.contiguous(), "slice": part}
        self.mask = None
        if masked:
            self.mask = torch.ones(batch, 1, 1, tokens, dtype=torch.bool, device=DEVICE)
            self.mask[..., 40:256] = False  # padding of a prompt of 40 tokens

    def output(self) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in self.inputs)
        return scaled_dot_product_attention(query, key, value, attn_mask=self.mask)

    def backward(self, layout: str, *, cudnn: bool) -> list[Tensor]:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        out = self.output().transpose(1, 2).flatten(2)
        return torch.autograd.grad(out, self.inputs, self.gradients[layout])


def compare(name: str, order: tuple[str, ...]) -> None:
    """Print, in this order of layouts, how far cuDNN's gradients are from the other kernels'."""
    problem = Problem(name)
    for layout in order:
        wanted = problem.backward(layout, cudnn=False)
        found = problem.backward(layout, cudnn=True)
        errors = [
            ((a.float() - b.float()).norm() / b.float().norm()).item()
            for a, b in zip(found, wanted, strict=True)
        ]
        print(f"{name}: {layout} gradient: relative error {max(errors):.2g}", flush=True)


def milliseconds(call) -> float:
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPEAT):
        call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / REPEAT


def speed(name: str) -> None:
    """Print the milliseconds of a forward and of a forward and backward, by either."""
    problem = Problem(name)
    for cudnn in (True, False):
        both = milliseconds(lambda cudnn=cudnn: problem.backward("contiguous", cudnn=cudnn))
        forward = milliseconds(problem.output)
        kernel = type(problem.output().grad_fn).__name__
        print(f"{name}: {kernel}: {forward:.3f} ms, with backward {both:.3f} ms", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="a shape, then the order, or none for the speed")
    given = parser.parse_args().only
    if given:
        compare(given[0], tuple(given[1:])) if given[1:] else speed(given[0])
        return 0
    for name in SHAPES:
        for order in (*ORDERS, ()):
            command = [sys.executable, __file__, "--only", name, *order]
            if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
                print(f"{name}: {' then '.join(order)}: ended by an error", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
