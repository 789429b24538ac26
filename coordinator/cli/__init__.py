"""What each of the operator's `wattfleet coordinator` commands does; `coordinator.cli.commands` names them."""
