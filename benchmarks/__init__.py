"""Measured figures: modules that run as `python -m benchmarks.<name> [--json]`."""
