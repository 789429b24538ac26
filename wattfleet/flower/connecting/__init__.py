"""Lets a user's `flwr` use the fleet's SuperLink."""
