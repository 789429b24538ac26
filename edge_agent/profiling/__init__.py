"""Measures power modes, and stores the measurements in a journal."""
