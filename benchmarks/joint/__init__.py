"""Compares choosing mode and batch size together, on two simulated boards, with the published baselines."""
