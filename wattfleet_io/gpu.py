"""Waiting for work that torch has queued on a GPU."""

from __future__ import annotations

import sys


def wait_for_gpu() -> None:
    """Wait until the GPU has done what torch has queued, if this process uses torch on a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
