"""Measures the overhead of a round of a real Flower deployment, in addition to its training."""
