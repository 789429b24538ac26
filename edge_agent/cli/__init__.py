"""What each `wattfleet agent` command does; `edge_agent.cli.commands` names them."""
