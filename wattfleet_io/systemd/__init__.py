"""Installing Wattfleet's processes as systemd services."""
