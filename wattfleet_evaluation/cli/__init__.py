"""The `wattfleet evaluate` commands."""
