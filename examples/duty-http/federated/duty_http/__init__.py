"""A Flower app that shares its device with an inference server."""
