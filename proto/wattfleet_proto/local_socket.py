"""Where the agent listens for Flower's ClientApp."""

DEFAULT_SOCKET = "/run/wattfleet/agent.sock"
