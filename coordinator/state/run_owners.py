"""A run's owner: the app that started it.

The app proves its identity with a token and, over TLS, with its certificate. Only a hash of both is kept.
"""

from __future__ import annotations

import hashlib
import hmac

from coordinator.errors import NotRunOwnerError
from coordinator.state.names import LONGEST_NAME
from wattfleet.errors import InvalidInputError


def owner_of(token: str, peer: str = "") -> str:
    """The owner to store with a run: a hexadecimal SHA-256; empty without a token and a certificate.

    Args:
        token: the app's token.
        peer: the id in the app's certificate; empty without one.

    Raises:
        InvalidInputError: the token is too long.
    """
    if len(token) > LONGEST_NAME:
        raise InvalidInputError(f"a run's token must have at most {LONGEST_NAME} characters, not {len(token):,}")
    proof = f"{peer}\n{token}" if peer else token
    return hashlib.sha256(proof.encode(errors="replace")).hexdigest() if proof else ""


def require_owner(run_id: str, owner: str, token: str, peer: str = "") -> None:
    """Check that a request about a run comes from its owner; a run without an owner accepts any request.

    A run that was started in plaintext belongs to whoever has its token, so that it can continue over TLS.

    Raises:
        NotRunOwnerError: the request has another token or certificate, or none.
        InvalidInputError: the token is too long.
    """
    proofs = {owner_of(token), owner_of(token, peer)} - {""}
    if owner and not any(hmac.compare_digest(owner, proof) for proof in proofs):
        raise NotRunOwnerError(
            f"run {run_id!r} was started by another app: only that app can plan, report and finish its rounds; start a "
            "run of your own"
        )
