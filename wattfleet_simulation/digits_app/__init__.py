"""A complete Flower app: a small network on handwritten digits, power-aware by one line on either side."""
