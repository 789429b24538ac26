"""Federated learning on 50 simulated boards under a site's watts: Wattfleet's round plans against other ways."""
