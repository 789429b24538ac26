"""The commands `wattfleet evaluate transfer`, `choice` and `report`."""
