"""The coordinator as a systemd service: its unit, and how it is installed."""
