"""One round's training on the device: the local socket, the mode in force, and the knobs put back."""
