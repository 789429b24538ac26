"""Pareto fronts, the choice of a power mode, and which modes to measure for it."""
