"""Scores of predictors and choices against measured modes."""
