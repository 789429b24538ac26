"""`wattfleet coordinator export`: everything planned and observed, as tables."""
