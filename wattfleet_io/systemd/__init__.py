"""Installs Wattfleet's processes as systemd services."""
