"""A complete Flower app that trains on handwritten digits. One line on each side makes it power-aware."""
