"""How predictors and choices are scored against measured modes."""
