"""`python -m wattfleet_flower.supernode`, the same as `wattfleet-supernode`."""

from wattfleet_flower.supernode.command import main

main()
