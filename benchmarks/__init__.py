"""Benchmarks, which run as `python -m benchmarks.<name> [--json]`."""
