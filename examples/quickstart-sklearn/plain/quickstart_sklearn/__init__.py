"""A first Flower app with scikit-learn: handwritten digits, split over the nodes."""
