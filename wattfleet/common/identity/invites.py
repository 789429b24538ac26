"""The line that enrols a machine: the address, the expected authority, a token, and the time.

`wfj1/10.0.0.2:7071/CA/TOKEN/1790000000`: CA is the SHA-256 of the authority's certificate and TOKEN a secret of 32
bytes, both as base64url; the time is that of the coordinator in seconds since 1970, for boards without a clock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, TextIO

import click
import typer
from typer.core import TyperCommand

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


# --- Invite input -----------------------------------------------------------------------------------------------------
# Reads an invite from standard input, never from an argument, which other users and the shell's history would see.


_LONGEST_LINE = 4096

ArgumentsGiven = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")]
"""The annotation of arguments that a command does not accept, so that `read_invite` can explain what is wrong."""


class InviteCommand(TyperCommand):
    """A command whose usage omits the declared `ArgumentsGiven`."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The parts of the usage after the command's name."""
        return [piece for piece in super().collect_usage_pieces(ctx) if piece.strip("[].")]


def read_invite(arguments: Sequence[str] | None, command: str, stream: TextIO | None = None) -> Invite:
    """Read an invite from a hidden prompt on a terminal, or from the first line of a pipe or file.

    Args:
        arguments: the arguments given to the command.
        command: the command as typed, for messages.
        stream: standard input, except in tests.

    Raises:
        InvalidInputError: there is no invite, it is incomplete, or it was given as an argument. No message quotes it.
    """
    if arguments:
        _refuse(arguments, command)
    stream = stream or sys.stdin
    if stream.isatty():
        line = click.prompt("Invite (not shown)", hide_input=True, err=True)
    else:
        line = stream.readline(_LONGEST_LINE)
    if not line.strip():
        raise InvalidInputError(
            f"standard input has no invite: run `{command}` and paste the line of `wattfleet coordinator invite`, or"
            f" run `{command} < FILE`"
        )
    return Invite.parse(line)


def _refuse(arguments: Sequence[str], command: str) -> None:
    if not any(PREFIX in argument for argument in arguments):
        raise InvalidInputError(f"`{command}` takes no argument, because it reads the invite from standard input")
    raise InvalidInputError(
        "an invite as an argument is in the process list and in the shell's history, so that others may have read it:"
        " treat its token as exposed. Cancel it with `wattfleet coordinator cancel-invite`, create another one with"
        f" `wattfleet coordinator invite`, and paste that one at the prompt of `{command}`, or run"
        f" `{command} < FILE`"
    )
