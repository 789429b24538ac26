"""Devices: the seam between the agent and a board, and the soft boards behind it."""
