"""A Flower app whose trainings only take time, on boards with agents. It notes every stage of a round in a file."""
