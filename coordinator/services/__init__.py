"""The gRPC services: they translate messages; the logic is in `coordinator.state`."""
