"""Predictors of a training step's time and a board's power, and how they are stored."""
