"""The default path of the agent's socket for Flower's ClientApp."""

DEFAULT_SOCKET = "/run/wattfleet/agent.sock"
