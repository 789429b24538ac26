"""How inference servers gather requests into batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batching:
    """How inference servers gather requests; the default leaves it to the servers.

    Attributes:
        batch: the most requests of a batch, and as many as to wait for; 0 for the server's own limit.
        wait_ms: no request waits longer than this before its batch is to be answered, even if the batch is not full.
    """

    batch: int = 0
    wait_ms: float = 0.0
