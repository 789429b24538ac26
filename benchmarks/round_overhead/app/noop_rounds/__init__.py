"""A Flower app whose rounds train nothing, and which records when each part of a round happened."""
