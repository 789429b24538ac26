"""Limits of what a loader says of itself: a ClientApp leaves out what exceeds them, since the agent refuses it."""

LARGEST_COUNT = 1_000_000
"""As `wattfleet.modes.LARGEST_COUNT`, which a ClientApp does not load: no batch or number of processes is larger."""

MAX_MINIBATCHES_PER_EPOCH = 2**31 - 1
"""Limit of a loader's length."""
