"""Settings of a process: options override the environment, which overrides a TOML file."""
