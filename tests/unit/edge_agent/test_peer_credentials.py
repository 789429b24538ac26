"""Which users may use the agent's socket."""

from __future__ import annotations

import pytest

from edge_agent.runtime.peer_credentials import PeerCredentials, PeerNotAllowedError, SocketUsers

OWNER, OTHER, MEMBERS, GROUP = 1000, 1001, 50, 60


@pytest.mark.parametrize(
    ("gid", "peer", "admitted"),
    [
        (MEMBERS, PeerCredentials(1, 0, 0, frozenset()), True),
        (MEMBERS, PeerCredentials(1, OWNER, GROUP, frozenset()), True),
        (MEMBERS, PeerCredentials(1, OTHER, MEMBERS, frozenset()), True),
        (MEMBERS, PeerCredentials(1, OTHER, GROUP, frozenset({MEMBERS})), True),
        (MEMBERS, PeerCredentials(1, OTHER, GROUP, frozenset({GROUP})), False),
        # The peer's groups are unknown: the kernel has compared them with the socket file's.
        (MEMBERS, PeerCredentials(1, OTHER, GROUP, None), True),
        (None, PeerCredentials(1, OWNER, GROUP, frozenset()), True),
        (None, PeerCredentials(1, OTHER, GROUP, frozenset({MEMBERS})), False),
        (None, PeerCredentials(1, OTHER, GROUP, None), False),
    ],
)
def test_root_the_agents_user_and_members_are_admitted(gid: int | None, peer: PeerCredentials, admitted: bool) -> None:
    users = SocketUsers(gid, OWNER)
    assert users.admits(peer) is admitted
    if admitted:
        users.require(peer)
        return
    remedy = "--socket-group" if gid is None else "usermod -aG"
    with pytest.raises(PeerNotAllowedError, match=f"user {OTHER} may not use the agent's socket, .*{remedy}"):
        users.require(peer)
