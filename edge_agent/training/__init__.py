"""One round's training on the device: applies its mode, observes it, and restores the knobs."""
