"""Devices: the interface between the agent and a board, and its implementations."""
