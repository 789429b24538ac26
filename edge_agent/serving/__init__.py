"""Shares one device between inference and training in turns: the duty, live estimates, and the service for both."""
