"""gRPC's context of a plaintext call, for servicers that are called directly."""

from __future__ import annotations


class PlaintextContext:
    """The context of a caller without a certificate."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}
