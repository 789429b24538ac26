"""The agent as a systemd service: its unit, and how it is installed."""
