"""Strategies of choosing a power mode under a budget: Wattfleet's own, and what it is compared with."""
