"""Limits on the size of a message, which clients and servers share."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of any message: what came of a round of ten thousand devices, each with its reason, fits."""

MAX_STREAMED_BYTES = 1024 * 1024
"""Of each message of a stream, of which there may be as many at once as there are agents."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of any answer, which only those take who asked for it: the plan of a large round has a reason for every device."""
