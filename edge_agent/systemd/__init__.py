"""The agent as a service of systemd: its unit, and what puts it in place."""
