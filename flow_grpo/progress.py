"""Show progress on the main process, and turn Ctrl-C into an orderly stop."""

import logging
import signal
import sys

import torch
from tqdm import tqdm

logger = logging.getLogger(__name__)


def progress_bar(accelerator, label: str, total: int) -> tqdm:
    """Return a bar that only the main process draws, and only on a terminal."""
    return tqdm(
        total=total,
        desc=label,
        leave=False,
        disable=not (accelerator.is_main_process and sys.stderr.isatty()),
        mininterval=1,
        dynamic_ncols=True,
    )


class StopRequest:
    """Remember, inside its block, the first Ctrl-C or SIGTERM; the second interrupts at once."""

    def __init__(self):
        self.requested = False
        self._before = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self, accelerator) -> bool:
        """Return whether any process was asked to stop."""
        flag = torch.tensor([float(self.requested)], device=accelerator.device)
        return bool(accelerator.reduce(flag, "sum").item())

    def _on_signal(self, number, frame) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning("stopping: this epoch is finished and saved first; again to stop at once")
