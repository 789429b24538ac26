"""The published baseline PowerTrain: its networks and the predictors built on them."""
