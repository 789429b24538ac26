"""What each `wattfleet agent` command does; `edge_agent.commands` names them."""
