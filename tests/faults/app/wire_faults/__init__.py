"""Rounds whose trainings only take time."""
