"""Who a run belongs to: the app that started it, which proves it with a token. Only the hash of it is kept."""

from __future__ import annotations

import hashlib
import hmac

from coordinator.errors import NotRunOwnerError
from coordinator.state.names import LONGEST_NAME
from wattfleet.errors import InvalidInputError


def owner_of(token: str) -> str:
    """The owner that a run is stored with: the sha256 of its token, hexadecimal; empty without a token.

    Raises:
        InvalidInputError: the token is too long.
    """
    if len(token) > LONGEST_NAME:
        raise InvalidInputError(f"a run's token must have at most {LONGEST_NAME} characters, not {len(token):,}")
    return hashlib.sha256(token.encode(errors="replace")).hexdigest() if token else ""


def require_owner(run_id: str, owner: str, token: str) -> None:
    """Make sure that a request about a run comes from its owner; a run without an owner takes any request.

    Raises:
        NotRunOwnerError: it carries another token, or none.
        InvalidInputError: the token is too long.
    """
    if owner and not hmac.compare_digest(owner, owner_of(token)):
        raise NotRunOwnerError(
            f"run {run_id!r} was started by another app: only that app can plan, report and finish its rounds; start a"
            " run of your own"
        )
