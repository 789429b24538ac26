"""A first Flower app with PyTorch: handwritten digits, split over the nodes."""
