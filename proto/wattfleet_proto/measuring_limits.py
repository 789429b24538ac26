"""Time limits of a training that is run in order to measure: the coordinator, the agents and the apps keep them."""

LONGEST_FACTOR = 2.0
"""A measurement that has begun is completed, within this multiple of the time in which measurements may begin."""

ENDS_WITHIN_S = 10.0
"""Seconds that a plan waits for trainings that were told to end. An app that reports its minibatches ends after the
current one."""
