"""The agent's own metrics, which Prometheus reads directly from the device."""
