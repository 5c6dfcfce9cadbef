"""Make transformer tokens of latents and undo it: a token is a square of 2 x 2 latents."""

from torch import Tensor

PATCH = 2  # height and width of the latents that make one token


def pack(latents: Tensor) -> Tensor:
    """Return the token grid (b, h/2, w/2, 4c) of latents (b, c, h, w).

    Its `flatten(1, 2)` is what FLUX's and Qwen-Image's pipelines call packed latents.
    """
    grid = latents.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # (b, c, h/2, 2, w/2, 2)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3)


def unpack(grid: Tensor) -> Tensor:
    """Return the latents (b, c, h, w) of a token grid (b, h/2, w/2, 4c)."""
    squares = grid.unflatten(3, (-1, PATCH, PATCH))  # (b, h/2, w/2, c, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
