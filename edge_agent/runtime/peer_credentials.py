"""Identifies the process at the other end of a unix socket, as reported by the kernel."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from contextvars import ContextVar
from dataclasses import dataclass

from wattfleet.core.errors import WattfleetError

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # Linux 4.13 and later; Python does not name it
_MOST_BYTES = 1024  # the most that Python reads of a socket option: 256 groups


class PeerNotAllowedError(WattfleetError):
    """The user of the calling process may not use the agent's socket."""


@dataclass(frozen=True)
class PeerCredentials:
    """The process that opened a connection, as it was at that time.

    Attributes:
        pid: its process id; 0 if it runs in another container, which hides the id.
        uid: its user id.
        gid: its group id.
        further_groups: the ids of its other groups; None if the kernel does not report them.
    """

    pid: int
    uid: int
    gid: int
    further_groups: frozenset[int] | None = None

    @classmethod
    def of(cls, connection: socket.socket) -> PeerCredentials:
        """Return the kernel's record of the process that opened a connection.

        Raises:
            OSError: the connection is not one of a unix socket.
        """
        content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(content)
        try:
            groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
        except OSError:  # an old kernel, or more groups
            return cls(pid, uid, gid)
        return cls(pid, uid, gid, frozenset(each for (each,) in struct.iter_unpack("I", groups)))

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "a process of another container"
        return f"user {user_name(self.uid)}, {process}"


PEER: ContextVar[PeerCredentials | None] = ContextVar("the process that called", default=None)
"""Set for each call over the agent's socket."""


@dataclass(frozen=True)
class SocketUsers:
    """The users of a socket: root, the agent's own user, and the members of a group.

    Attributes:
        gid: the group's id; None if only root and the agent's own user may use the socket.
        uid: the id of the agent's own user.
    """

    gid: int | None
    uid: int

    @classmethod
    def of_group(cls, gid: int | None) -> SocketUsers:
        """Return the users of a socket that this process serves."""
        return cls(gid, os.geteuid())

    def owns(self, peer: PeerCredentials) -> bool:
        """Return whether a peer is root or the agent's own user."""
        return peer.uid in (0, self.uid)

    def admits(self, peer: PeerCredentials) -> bool:
        """Return whether a peer may use the socket.

        If the kernel does not report a peer's groups, rely on the socket file's mode, which the kernel has already
        checked against them.
        """
        if self.owns(peer):
            return True
        if self.gid is None:
            return False
        return peer.gid == self.gid or peer.further_groups is None or self.gid in peer.further_groups

    def require(self, peer: PeerCredentials) -> None:
        """Raise an error unless a peer may use the socket.

        Raises:
            PeerNotAllowedError: it may not.
        """
        if self.admits(peer):
            return
        refused = f"user {user_name(peer.uid)} may not use the agent's socket, which is for root"
        if self.gid is None:
            raise PeerNotAllowedError(
                f"{refused} and the agent's own user: name a group with the agent's --socket-group"
            )
        raise PeerNotAllowedError(
            f"{refused}, the agent's own user and the group {group_name(self.gid)}: add the user with `usermod -aG`,"
            " and log in again"
        )


def user_name(uid: int) -> str:
    """Return a user's name, or the user id if it has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name, or the group id if it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
