"""Input and output shared by all processes: files, child processes, signals, addresses and the `wattfleet` command."""
