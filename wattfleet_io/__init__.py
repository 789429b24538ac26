"""What all processes share at their edges: files, child processes, signals, addresses and the `wattfleet` command."""
