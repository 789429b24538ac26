"""What each of the operator's `wattfleet coordinator` commands does; `coordinator.commands` names them."""
