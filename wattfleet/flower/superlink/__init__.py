"""Runs Flower's SuperLink with a TLS certificate from the fleet's authority, and registers the enrolled SuperNodes."""
