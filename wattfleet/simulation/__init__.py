"""Runs a whole fleet on one machine with the real programs; only the boards are simulated."""
