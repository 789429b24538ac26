"""The agent's own metrics, which Prometheus reads from the device itself."""
