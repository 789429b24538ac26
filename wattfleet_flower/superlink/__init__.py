"""Flower's SuperLink with TLS from the fleet's authority, which knows the SuperNodes that are enrolled."""
