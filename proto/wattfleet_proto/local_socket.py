"""The path of the agent's socket for Flower's ClientApp, and for inference servers."""

from contextvars import ContextVar

DEFAULT_SOCKET = "/run/wattfleet/agent.sock"

CURRENT_SOCKET: ContextVar[str] = ContextVar("the agent's socket of this context's training", default=DEFAULT_SOCKET)
"""Set by the mod while the app trains."""
