"""Settings of the Python interpreter for a process that serves a large fleet."""

from __future__ import annotations

import gc
import sys
from typing import Any

# Exporting metrics or planning for a large fleet keeps another thread busy for a second. With the default switch
# interval of 5 ms, each answer to an agent would wait that long for its turn.
_SWITCH_S = 0.0005


def serve_many() -> None:
    """Keep other threads and the garbage collector from delaying answers to agents.

    A full collection over ten thousand sessions takes half a second and finds nothing, because a session frees its
    objects when it ends. Objects that survive one full collection are therefore left out of the next.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
