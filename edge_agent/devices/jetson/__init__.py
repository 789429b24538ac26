"""NVIDIA Jetsons: what their kernel shows of them, and how it is told to change."""
