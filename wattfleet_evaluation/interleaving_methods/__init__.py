"""Methods that choose a power mode and an inference batch for training and inference that share a board."""
