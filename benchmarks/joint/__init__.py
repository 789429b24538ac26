"""Choosing mode and batch size together on two simulated boards, compared with the published baselines."""
