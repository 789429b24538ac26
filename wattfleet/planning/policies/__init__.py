"""Policies: which devices a round should take, and how many."""
