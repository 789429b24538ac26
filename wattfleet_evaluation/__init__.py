"""Evaluation of predictors and of methods of choosing a power mode, beside the published baselines."""
