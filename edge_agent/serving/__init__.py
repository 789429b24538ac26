"""Inference and training on one device in turns: the duty, live estimates, and the service for both."""
