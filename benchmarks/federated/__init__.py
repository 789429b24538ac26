"""Federated learning on 50 simulated boards under a site's budget: Wattfleet's plans and other methods."""
