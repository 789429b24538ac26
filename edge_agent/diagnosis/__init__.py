"""Checks what an agent needs of a machine, with advice on problems; behind `wattfleet agent doctor`."""
