"""How inference servers gather requests into batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batching:
    """How inference servers gather requests; by default, each server decides.

    Attributes:
        batch: maximum number of requests in a batch, and the number to wait for; 0 for the server's own limit.
        wait_ms: longest time that a request waits for its batch to fill; then the batch is answered as it is.
    """

    batch: int = 0
    wait_ms: float = 0.0
