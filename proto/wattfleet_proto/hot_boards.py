"""When a board is hot, for the agents that measure it and for those who look at it."""

from __future__ import annotations

HOT_C = 85.0
"""From this temperature of the chip on, degrees Celsius. Agents discard what they measure above it, unless they are
told another limit, and boards throttle near 95."""

COOL_C = 82.0
"""A hot board is no longer hot below this temperature, degrees Celsius. A board that keeps close to `HOT_C` would
otherwise be hot and not hot many times an hour."""
