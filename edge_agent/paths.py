"""Where an agent's files lie unless told otherwise."""

from __future__ import annotations

DEFAULT_STATE_DIRECTORY = "/var/lib/wattfleet"
DEFAULT_SOCKET = "/run/wattfleet/agent.sock"
