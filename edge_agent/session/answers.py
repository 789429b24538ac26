"""Checks a coordinator's answers, since the coordinator may be broken or belong to someone else."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from wattfleet.errors import WattfleetError
from wattfleet_proto.session_limits import (
    LEASE_S,
    MAX_RECONNECT_S,
    MAX_REFERENCES_IN_FORCE,
    MAX_SHARED_MODES,
    PROFILE_MODES,
)
from wattfleet_proto.v1 import session_pb2

# The digest becomes the name of a folder.
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnusableAnswerError(WattfleetError):
    """The coordinator's answer cannot be used: the agent reports this to its owner, and reconnects after a pause."""


@dataclass(frozen=True)
class Pace:
    """The accepted intervals of a session.

    Attributes:
        lease_s: longest time between two messages from this agent, seconds; 0 before the first Welcome.
        reconnect_s: a lost session is opened again at a random moment within this time, seconds.
    """

    lease_s: float = 0.0
    reconnect_s: float = 0.0

    def after(self, answer: session_pb2.Welcome | session_pb2.Ack) -> Pace:
        """Return the intervals after an answer; an interval of 0 in it leaves the current one unchanged.

        Intervals beyond the limits are replaced by the nearest limit.

        Raises:
            UnusableAnswerError: an interval is negative or not finite, or a Welcome has no lease.
        """
        for name, value in (("lease_s", answer.lease_s), ("reconnect_s", answer.reconnect_s)):
            if not 0 <= value < math.inf:
                raise UnusableAnswerError(f"{name} must be finite and at least 0, not {value:g}")
        lease_s = answer.lease_s or self.lease_s
        if not lease_s:
            raise UnusableAnswerError("its Welcome has no lease_s")
        shortest_s, longest_s = LEASE_S
        return Pace(
            min(max(lease_s, shortest_s), longest_s), min(answer.reconnect_s or self.reconnect_s, MAX_RECONNECT_S)
        )


def require_usable(welcome: session_pb2.Welcome) -> None:
    """Check what a Welcome requests.

    Raises:
        UnusableAnswerError: it names no reference or too many, or too few or too many modes.
    """
    digests = (welcome.reference_digest, *welcome.further_reference_digests)
    if not all(_DIGEST.fullmatch(digest) for digest in digests[: MAX_REFERENCES_IN_FORCE + 1]):
        raise UnusableAnswerError("its Welcome names no reference")
    if len(digests) > MAX_REFERENCES_IN_FORCE:
        raise UnusableAnswerError(
            f"its Welcome names {len(digests):,} references; the limit is {MAX_REFERENCES_IN_FORCE}"
        )
    fewest, most = PROFILE_MODES
    if not fewest <= welcome.profile_modes <= most:
        raise UnusableAnswerError(f"profile_modes must be {fewest} to {most:,}, not {welcome.profile_modes:,}")
    if welcome.share_modes > MAX_SHARED_MODES:
        raise UnusableAnswerError(f"share_modes must be 0 to {MAX_SHARED_MODES}, not {welcome.share_modes:,}")
