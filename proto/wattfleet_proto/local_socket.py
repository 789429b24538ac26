"""The path of the agent's socket for Flower's ClientApp, and for inference servers."""

from contextvars import ContextVar
from pathlib import Path

DEFAULT_SOCKET = "/run/wattfleet/agent.sock"

CURRENT_SOCKET: ContextVar[str] = ContextVar("the agent's socket of this context's training", default=DEFAULT_SOCKET)
"""Set by the mod while the app trains."""


def owner_socket(socket: Path) -> Path:
    """The socket beside an agent's, on which only the agent's own user may change what the device does."""
    return socket.with_name(f"{socket.stem}-owner{socket.suffix}")
