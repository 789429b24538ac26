"""What Prometheus reads of a coordinator, and the server of `/metrics`."""
