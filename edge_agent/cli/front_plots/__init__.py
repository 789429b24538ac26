"""Plots of a device's front: in a terminal, as an HTML page, as a PNG image."""
