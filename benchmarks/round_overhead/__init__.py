"""What a round of a real Flower deployment costs beside its training."""
