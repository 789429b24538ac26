"""The line that enrols a machine: the address, the expected authority, a token, and the time.

`wfj1/10.0.0.2:7071/CA/TOKEN/1790000000`: CA is the SHA-256 of the authority's certificate and TOKEN a secret of 32
bytes, both as base64url; the time is that of the coordinator in seconds since 1970, for boards without a clock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field
from datetime import datetime

from wattfleet.common.addresses import split_address
from wattfleet.common.parsing import utc_from
from wattfleet.core.errors import InvalidInputError

PREFIX = "wfj1"
"""The beginning of every line."""

_SECRET_BYTES = 32


def new_token() -> str:
    """Create a random token, as base64url."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def token_hash(token: str) -> str:
    """The hash to store in place of a token: its SHA-256, hexadecimal. A token is random, so no slow hash is needed."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Invite:
    """The contents of the line.

    Args:
        address: the coordinator's host:port for enrolment.
        authority: the SHA-256 of the authority's certificate, 32 bytes.
        token: the secret that lets a machine enrol.
        issued_at: the coordinator's time.
    """

    address: str
    authority: bytes
    token: str = field(repr=False)
    issued_at: datetime

    @property
    def line(self) -> str:
        """The line to paste."""
        authority = base64.urlsafe_b64encode(self.authority).decode().rstrip("=")
        return "/".join([PREFIX, self.address, authority, self.token, str(int(self.issued_at.timestamp()))])

    @classmethod
    def parse(cls, line: str) -> Invite:
        """Parse a pasted line.

        Raises:
            InvalidInputError: the text is not such a line, or incomplete. The message does not quote the secret line.
        """
        try:
            prefix, address, authority, token, seconds = line.strip().split("/")
            if prefix != PREFIX or len(_decoded(token)) != _SECRET_BYTES or len(seconds) < 10:
                raise ValueError
            decoded = _decoded(authority)
            if len(decoded) != hashlib.sha256().digest_size:
                raise ValueError
            issued_at = utc_from(int(seconds))
            host, port = split_address(address)
        except (ValueError, binascii.Error, InvalidInputError):
            raise InvalidInputError(
                "this is not the whole line that `wattfleet coordinator invite` printed: copy it again, from"
                f" {PREFIX}/ to its end"
            ) from None
        return cls(f"{host}:{port}", decoded, token, issued_at)


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
