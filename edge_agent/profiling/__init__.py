"""Measuring power modes, and the journal that keeps what was measured."""
