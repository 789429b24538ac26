"""Waits for work that torch has queued on a GPU."""

from __future__ import annotations

import sys


def wait_for_gpu() -> None:
    """If this process uses torch on a GPU, wait until the GPU has done all queued work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
