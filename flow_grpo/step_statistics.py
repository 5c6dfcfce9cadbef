"""Collect, per denoising step, how far the ratio has moved and which side was clipped.

GRPO-Guard's diagnosis (Wang et al., arXiv 2510.22319): means below 1 and unequal spreads over the
steps mean that one clip range cannot fit them all.
"""

import torch
from torch import Tensor

# count, sum and squares of the log-ratio; rows of positive advantage, clipped; negative, clipped
NUM_SUMS = 7


class StepStatistics:
    """Sums over rows, one line per trained step."""

    def __init__(self, num_steps: int, device):
        self._sums = torch.zeros(num_steps, NUM_SUMS, dtype=torch.float64, device=device)

    def add(self, step: Tensor, advantage: Tensor, weight: Tensor, metrics: dict) -> None:
        """Take in rows (b,): `metrics` holds their log_ratio and whether they were clipped."""
        log_ratio, clipped = metrics["log_ratio"].double(), metrics["clipped"].double()
        up, down = (advantage > 0).double(), (advantage < 0).double()
        columns = [
            torch.ones_like(log_ratio), log_ratio, log_ratio.square(),
            up, up * clipped, down, down * clipped,
        ]  # fmt: skip
        rows = torch.stack(columns, 1) * weight.double()[:, None]
        self._sums.index_add_(0, step.to(self._sums.device), rows)

    def metrics(self, accelerator, trained: tuple[int, ...]) -> dict[str, float]:
        """Return train/step_<t>/{log_ratio_mean, log_ratio_std, clip_positive, clip_negative}.

        Over the rows of all ranks; train/{clip_positive, clip_negative} are over all steps. What
        no row tells has no entry.
        """
        sums = accelerator.reduce(self._sums, "sum")
        found = _clipped("train/", sums.sum(0).tolist())
        for t, step_sums in zip(trained, sums.tolist(), strict=True):
            count, total, squares, *_ = step_sums
            name = f"train/step_{t}/"
            if count:
                mean = total / count
                found[name + "log_ratio_mean"] = mean
                found[name + "log_ratio_std"] = max(squares / count - mean**2, 0.0) ** 0.5
            found |= _clipped(name, step_sums)
        return found


def _clipped(name: str, sums: list[float]) -> dict[str, float]:
    """Return the shares of rows of positive and of negative advantage that were clipped."""
    *_, up, up_clipped, down, down_clipped = sums
    shares = {"clip_positive": (up_clipped, up), "clip_negative": (down_clipped, down)}
    return {name + side: clipped / rows for side, (clipped, rows) in shares.items() if rows}
