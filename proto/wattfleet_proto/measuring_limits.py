"""Limits of trainings in which modes are measured: the coordinator, the agents and the apps keep them."""

LONGEST_FACTOR = 2.0
"""A measurement that has begun is completed, within this multiple of the time in which measurements may begin."""

ENDS_WITHIN_S = 10.0
"""Seconds that a plan waits for trainings that were told to end. An app that reports its minibatches ends after the
current one."""

SURVEY_MODES = 5
"""Modes that a device measures before a run's first plan; about as many as one fit chooses. A device that has measured
fewer may make a round longer."""
