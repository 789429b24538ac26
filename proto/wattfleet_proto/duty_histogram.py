"""The limits of the histogram of latencies in `DutyFigures`."""

LATENCY_LIMITS_MS = (5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 150.0, 200.0, 350.0, 500.0, 750.0, 1e3, 2e3, 5e3, 1e4)
"""Upper limits, ms, ascending; one more count is of later answers."""
