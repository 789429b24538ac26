"""Power meters, and the sensors that they sample."""
