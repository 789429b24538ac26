"""Compares Wattfleet's plans with other methods for federated learning on 50 simulated boards under a site budget."""
