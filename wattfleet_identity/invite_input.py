"""Reads an invite from standard input, never from an argument, which other users and the shell's history would see."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, TextIO

import click
import typer
from typer.core import TyperCommand

from wattfleet.errors import InvalidInputError
from wattfleet_identity.invites import PREFIX, Invite

_LONGEST_LINE = 4096
_PLAUSIBLE_LAG = timedelta(days=1)

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


def plausible_time(invite: Invite, now: datetime) -> datetime:
    """The later of this machine's time and the invite's, because a board without a battery may start years in the past.

    Warns if the clock is more than a day behind the invite.

    Raises:
        InvalidInputError: the clock is so wrong that no certificate is valid yet; the invite was not used.
    """
    from wattfleet_identity.authority import VALID_FROM  # slow to import for a command's options

    text = (
        f"this machine's clock shows {now:%Y-%m-%d %H:%M} UTC, but the invite is of {invite.issued_at:%Y-%m-%d %H:%M}"
    )
    remedy = (
        f"set it with `sudo date -u -s '{invite.issued_at:%Y-%m-%d %H:%M}'`, and let it follow a time server, such as"
        " with `sudo timedatectl set-ntp true`"
    )
    if now < VALID_FROM:
        raise InvalidInputError(f"{text}, and no certificate is valid at that time: {remedy}. The invite was not used")
    if now < invite.issued_at - _PLAUSIBLE_LAG:
        click.echo(f"warning: {text}: {remedy}", err=True)
    return max(now, invite.issued_at)
