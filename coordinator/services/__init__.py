"""The gRPC services and their background tasks: they translate messages; the logic is in `coordinator.state`."""
