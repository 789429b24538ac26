"""The coordinator's metrics for Prometheus, and the server of `/metrics`."""
