"""Limits of what a coordinator may ask of an agent: the coordinator keeps them, and agents hold it to them."""

LEASE_S = (1.0, 120.0)
"""Shortest and longest lease, seconds. An agent sends a message in each."""

MAX_RECONNECT_S = 120.0
"""Longest time over which an agent spreads its reconnection, seconds."""

PROFILE_MODES = (5, 10_000)
"""Fewest and most modes to measure. A predictor needs five."""

MAX_SHARED_MODES = 16
"""Measured modes that a device shares of each workload at most."""

MAX_UNITS = 4
"""Other devices of its kind that a device learns from at most: each makes its fits take longer."""

MAX_OTHER_KINDS = 2
"""Other kinds of board from each of which a device learns a workload, by one device of that kind."""

MAX_REFERENCES_IN_FORCE = 4
"""Reference predictors that a device transfers from: each makes its fits take longer."""
