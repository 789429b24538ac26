"""Limits that both sides of a connection keep."""

from __future__ import annotations

from dataclasses import dataclass

# --- Loader limits ----------------------------------------------------------------------------------------------------
# Limits of what a loader says of itself: a ClientApp leaves out what exceeds them, since the agent refuses it.


LARGEST_COUNT = 1_000_000
"""`wattfleet.core.modes.LARGEST_COUNT`, which a ClientApp does not load: no batch or number of processes is larger."""

MAX_MINIBATCHES_PER_EPOCH = 2**31 - 1
"""Limit of a loader's length."""


# --- Measuring limits -------------------------------------------------------------------------------------------------
# Limits of trainings in which modes are measured: the coordinator, the agents and the apps keep them.

LONGEST_FACTOR = 2.0
"""A measurement that has begun is completed, within this multiple of the time in which measurements may begin."""

ENDS_WITHIN_S = 10.0
"""Seconds that a plan waits for trainings that were told to end. An app that reports its minibatches ends after the
current one."""

SURVEY_MODES = 5
"""Modes that a device measures before a run's first plan; about as many as one fit chooses. A device that has measured
fewer may make a round longer."""


@dataclass(frozen=True, slots=True)
class MeasuringLimits:
    """The limits of the measurements in a training that is run in order to measure.

    Attributes:
        modes: the most modes to measure; 0 to learn only the facts of the app's loader.
        longest_s: seconds after which no further measurement begins.
    """

    modes: int
    longest_s: float


# --- Message sizes ----------------------------------------------------------------------------------------------------
# Size limits of messages, shared by clients and servers.

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Limit of a request with one element for each device: the results of a round with ten thousand devices fit."""

MAX_STREAMED_BYTES = 1024 * 1024
"""Limit of any other request, and of one message of a stream, since every agent may send one at the same time."""

MAX_ELEMENTS = 20_000
"""Limit of the elements of a list in a request: twice the devices of the largest fleet that was tested."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Limit of a response: the plan of a large round has a reason for each device."""

MAX_ID_CHARACTERS = 200
"""Limit of an id or a name."""

MAX_ROUNDS = 1_000_000
"""Limit of a run's rounds, and of a round's number."""

MAX_PLAN_ID_CHARACTERS = MAX_ID_CHARACTERS + len(f"/measuring-{2**62}")
"""Limit of a plan's id, which is its run's id and its round's number, or the number of a grant to measure."""

MAX_MANIFEST_BYTES = 100 * 1024
"""Limit of a reference predictor's manifest, which is sent in one message."""

MAX_WEIGHTS_BYTES = 4 * 1024 * 1024
"""Limit of a reference predictor's weights, which are sent in chunks. The largest kind has less than 1 MiB."""

MAX_METADATA_BYTES = 64 * 1024
"""Limit of a file of the references' signed metadata, which is sent in one message. 32 references take 13 KiB."""

MAX_REASON_LENGTH = 500
"""Limit of a peer's reason in a log line or an error, in characters."""

MAX_DETAIL_CHARACTERS = 2_000
"""Largest detail of a device's state that is kept; agents cut longer ones."""

MAX_SESSION_BYTES = 64 * 1024
"""Largest message of an agent's session; a front of 64 points takes a tenth of it."""


# --- Session limits ---------------------------------------------------------------------------------------------------
# Limits of what a coordinator may ask of an agent: the coordinator keeps them, and agents hold it to them.

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


def is_flower_run(run_id: str) -> bool:
    """Whether a text can be the id of one of Flower's runs: an unsigned 64-bit number, in decimal."""
    return run_id.isascii() and run_id.isdecimal() and len(run_id) <= len(str(2**64))
