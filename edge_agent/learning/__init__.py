"""Fits the device's predictor to its measurements, and detects when the predictor is no longer valid."""
