"""Boards that exist only in software: simulated from fitted physics, or replayed from measurements."""
