"""Settings of the Python interpreter for a process that serves a large fleet."""

from __future__ import annotations

import gc
import sys
from typing import Any

# A scrape of a large fleet, or a plan for it, computes for a second in a thread of its own. By the interpreter's 5 ms,
# each answer to an agent would wait that long for its turn.
_SWITCH_S = 0.0005


def serve_many() -> None:
    """Have neither other threads nor the garbage collector keep agents waiting.

    What ten thousand sessions hold takes the collector half a second to look through, and it finds nothing: a session's
    objects go when it ends. So what has outlived one whole collection is left out of the next.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
