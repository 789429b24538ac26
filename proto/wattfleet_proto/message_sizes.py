"""Size limits of messages, shared by clients and servers."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Limit of a request: the results of a round with ten thousand devices and their failures fit."""

MAX_STREAMED_BYTES = 1024 * 1024
"""Limit of one message of a stream, since every agent may send one at the same time."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Limit of a response: the plan of a large round has a reason for each device."""

MAX_MANIFEST_BYTES = 100 * 1024
"""Limit of a reference predictor's manifest, which is sent in one message."""

MAX_WEIGHTS_BYTES = 4 * 1024 * 1024
"""Limit of a reference predictor's weights, which are sent in chunks. The largest kind has less than 1 MiB."""

MAX_REASON_LENGTH = 500
"""Limit of a peer's reason in a log line or an error, in characters."""
