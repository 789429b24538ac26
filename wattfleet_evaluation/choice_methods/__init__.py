"""Choice methods: ways to choose a power mode under a budget. One is Wattfleet's own, the others are baselines."""
