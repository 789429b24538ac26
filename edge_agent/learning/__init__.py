"""Fitting the device's predictor to what was measured, and noticing when it no longer holds."""
