"""The owner of a certificate: a device, a Flower app, a SuperLink, an operator or a viewer of one fleet.

The names are SPIFFE ids (https://spiffe.io/docs/latest/spiffe-specs/spiffe-id/), such as
`spiffe://fleet-1f3c/device/orin-3/board/agx-orin/installation/6f0c`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote, unquote

from wattfleet.core.errors import InvalidInputError, WattfleetError

_SCHEME = "spiffe://"
_LONGEST_ID = 2048
_FLEET = re.compile(r"[a-z0-9._-]{1,255}")


class Role(str, Enum):
    """The role of a peer; `coordinator/identity/access.py` defines what each role may do."""

    DEVICE = "device"
    FLOWER = "flower"
    SUPERLINK = "superlink"
    OPERATOR = "operator"
    VIEWER = "viewer"


USERS_OF_FLWR = (Role.FLOWER, Role.SUPERLINK, Role.OPERATOR)
"""The roles that may use `flwr` with the fleet's SuperLink."""


class UnknownPeerError(WattfleetError):
    """A certificate does not name a peer of this fleet: enrol the peer, or use its own certificate."""

    caller_must_correct = True


@dataclass(frozen=True, slots=True)
class Peer:
    """The owner of a certificate.

    Args:
        fleet: the fleet's name, a SPIFFE trust domain.
        role: its role.
        name: its name; a device's id.
        board: a device's kind of board; empty if the certificate leaves it open.
        installation: the installation of a device's agent; empty if the certificate leaves it open.

    Raises:
        InvalidInputError: a part cannot be in an id.
    """

    fleet: str
    role: Role
    name: str
    board: str = ""
    installation: str = ""

    def __post_init__(self) -> None:
        if not _FLEET.fullmatch(self.fleet):
            raise InvalidInputError(
                f"{self.fleet!r} cannot name a fleet: use up to 255 lower-case letters, digits, dots, dashes and"
                " underscores"
            )
        if not self.name:
            raise InvalidInputError(f"a certificate for a {self.role.value} needs a name")
        if (self.board or self.installation) and self.role is not Role.DEVICE:
            raise InvalidInputError("only devices have a board and an installation")
        if len(self.uri) > _LONGEST_ID:
            raise InvalidInputError(f"the name of {self.role.value} {self.name[:50]!r}... is too long: shorten it")

    @property
    def uri(self) -> str:
        """The SPIFFE id."""
        parts = [self.role.value, self.name]
        for key, value in (("board", self.board), ("installation", self.installation)):
            parts += [key, value] if value else []
        return _SCHEME + "/".join([self.fleet, *(quote(part, safe="") for part in parts)])

    @classmethod
    def from_uri(cls, uri: str) -> Peer:
        """Parse a SPIFFE id.

        Raises:
            UnknownPeerError: the id does not have a role and a name, or has unknown parts.
        """
        fleet, *parts = uri.removeprefix(_SCHEME).split("/") if uri.startswith(_SCHEME) else [""]
        values = [unquote(part) for part in parts]
        try:
            role, name = Role(values[0]), values[1]
            further = dict(zip(values[2::2], values[3::2], strict=True))
            return cls(fleet, role, name, **further)
        except (IndexError, InvalidInputError, TypeError, ValueError):
            raise UnknownPeerError(
                f"the certificate's name {uri[:200]!r} is not of the form spiffe://FLEET/ROLE/NAME with the role"
                f" {', '.join(role.value for role in Role)}: issue another certificate"
            ) from None

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}"
