"""NVIDIA Jetsons: reading and changing their settings through the kernel's files."""
