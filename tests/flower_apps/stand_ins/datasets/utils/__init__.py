"""Stands in for `datasets.utils`."""
