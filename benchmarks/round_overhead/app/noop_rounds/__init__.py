"""A Flower app whose rounds train nothing, and that says when each part of a round happened."""
