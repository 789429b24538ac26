"""Commands that run the agent as a service: `install`, `uninstall` and `run`."""
