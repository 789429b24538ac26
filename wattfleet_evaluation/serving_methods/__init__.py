"""Serving methods: ways to choose a power mode and a batch size for inference."""
