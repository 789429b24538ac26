"""Evaluation of predictors and choice methods on measured modes, compared with published baselines."""
