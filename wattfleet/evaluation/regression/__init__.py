"""Baselines from scikit-learn: general regressions, fitted to the measured modes alone."""
