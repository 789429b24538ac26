"""Size limits of messages, shared by clients and servers."""

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
