"""Checks whether a machine has what an agent needs, and advises on problems; used by `wattfleet agent doctor`."""
