"""`wattfleet coordinator export`: writes everything planned and observed to tables."""
