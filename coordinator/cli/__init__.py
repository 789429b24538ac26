"""The implementations of the operator's `wattfleet coordinator` commands; `coordinator.cli.commands` registers them."""
