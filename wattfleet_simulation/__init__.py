"""A whole fleet on one machine, out of the real parts; only the boards are simulated."""
