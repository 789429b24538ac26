"""A Flower app whose trainings only take time."""
