"""Layouts of commands' output for a terminal."""
