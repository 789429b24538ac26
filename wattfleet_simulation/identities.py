"""The authority of a simulated fleet, and the enrolment of its parts with one invite each."""

from __future__ import annotations

from pathlib import Path

from coordinator.cli.client import CoordinatorClient
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.identity.first_operator import folder_of, make_operator
from edge_agent.paths import IDENTITY_DIRECTORY, INSTALLATION_FILE, SUPERNODE_DIRECTORY
from edge_agent.runtime.installation import installation_name
from wattfleet_identity.endpoint import Endpoint
from wattfleet_identity.identity_folder import note_coordinator
from wattfleet_identity.invites import Invite
from wattfleet_identity.joining import Applicant, join_and_store
from wattfleet_identity.peers import Role
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import identity_pb2

_INVITE_TTL_S = 600.0


class FleetIdentities:
    """The authority of one fleet. Its keys are valid only for this fleet, and are deleted with their folder.

    Attributes:
        authority: folder for `wattfleet coordinator serve --identity`.
        operator: folder with the operator's identity, for commands.
    """

    def __init__(self, folder: Path) -> None:
        """Create an authority and its first operator.

        Args:
            folder: folder for both; created if it does not exist.
        """
        self.authority = folder
        self.operator = folder_of(folder)
        now = utc_now()
        make_operator(AuthorityFolder.create(folder, [], now), now)

    def serving_at(self, address: str) -> Endpoint:
        """Store the coordinator's address in the operator's identity, so that commands find it.

        Args:
            address: the coordinator's host:port.

        Returns:
            The coordinator's endpoint for the operator.
        """
        note_coordinator(self.operator, address)
        return Endpoint.of(None, self.operator)


def enrol_device(client: CoordinatorClient, device_id: str, board: str, state_dir: Path) -> None:
    """Enrol a device and its SuperNode as `wattfleet agent join` does.

    Args:
        client: the operator's client of the coordinator.
        device_id: id of the device.
        board: its kind of board.
        state_dir: the state directory of its agent.

    Raises:
        CoordinatorUnreachableError: the coordinator does not answer.
        RequestRefusedError: the coordinator refuses the invite.
        EnrolmentRefusedError: the coordinator refuses the device.
    """
    applicant = Applicant(device_id, board, installation_name(state_dir / INSTALLATION_FILE))
    supernode = state_dir / SUPERNODE_DIRECTORY
    _enrol(client, Role.DEVICE, device_id, applicant, state_dir / IDENTITY_DIRECTORY, supernode)


def enrol_flower(client: CoordinatorClient, folder: Path) -> None:
    """Enrol Flower's SuperLink, which also runs the ServerApp, as `wattfleet join` does; raises as `enrol_device`.

    Args:
        client: the operator's client of the coordinator.
        folder: folder for the key and the certificate.
    """
    _enrol(client, Role.SUPERLINK, "simulation", Applicant(), folder)


def _enrol(
    client: CoordinatorClient,
    role: Role,
    name: str,
    applicant: Applicant,
    folder: Path,
    supernode: Path | None = None,
) -> None:
    request = identity_pb2.InviteRequest(role=role.value, name=name, uses=1, ttl_s=_INVITE_TTL_S)
    invite = Invite.parse(client.administer("Invite", request).line)
    join_and_store(invite, lambda: applicant, folder, supernode)
