"""Starts the coordinator and the agents of a simulated fleet. All are enrolled and use mutual TLS."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from coordinator.cli.client import CoordinatorClient
from coordinator.identity.authority_folder import AuthorityFolder, folder_of, make_operator
from edge_agent.paths import IDENTITY_DIRECTORY, INSTALLATION_FILE, SUPERNODE_DIRECTORY
from edge_agent.runtime.agent import installation_name
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.identity_folder import note_coordinator
from wattfleet.common.identity.invites import Invite
from wattfleet.common.identity.joining import Applicant, join_and_store
from wattfleet.common.identity.peers import Role
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.flower import HOST, OFFLINE, PartFailedError, Parts, SuperNodeConfig, program
from wattfleet.simulation.settings import SimulationSettings
from wattfleet_proto.v1 import identity_pb2

# --- Identities -------------------------------------------------------------------------------------------------------
# The authority of a simulated fleet, and the enrolment of its parts with one invite each.


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
        InvalidRequestError: the coordinator refuses the invite.
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


# --- Fleet ------------------------------------------------------------------------------------------------------------

_READY_WITHIN_S = 180.0
_MODES_BESIDE_DUTY = 12
"""Number of modes that a board with a duty measures before its first round."""


def state_directory(scratch: Path, device_id: str) -> Path:
    """Return the state directory of a device's agent, in the scratch directory of a run."""
    return scratch / "agents" / device_id


class FleetParts:
    """Starts the coordinator and the agents of a run.

    Attributes:
        flower_identity: folder with the identity of Flower's server.
    """

    def __init__(self, parts: Parts, settings: SimulationSettings, scratch: Path) -> None:
        """Prepare the parts without starting them.

        Args:
            parts: the run's processes; those of the fleet are added.
            settings: what to simulate.
            scratch: a directory with a short path, for keys, sockets and state.
        """
        self.flower_identity = scratch / "flower-identity"
        self._parts = parts
        self._settings = settings
        self._scratch = scratch

    def start_coordinator(self, superlink: str) -> Endpoint:
        """Start a coordinator with its own authority; return the endpoint for its operator.

        Args:
            superlink: host:port of the run's SuperLink, which gets a certificate from the authority.

        Raises:
            PartFailedError: the coordinator did not start.
        """
        identities = FleetIdentities(self._scratch / "authority")
        announced = self._scratch / "coordinator.json"
        settings = self._settings
        command = [
            program("wattfleet"),
            *("coordinator", "serve", "--address", f"{HOST}:0", "--identity", str(identities.authority)),
            *("--http-address", f"{HOST}:{settings.metrics_port}", "--superlink-address", superlink),
            *("--store", str(self._scratch / "coordinator.db"), "--announce", str(announced)),
            *("--site-budget-w", str(settings.site_budget_w), "--policy", settings.policy),
            *("--seed", str(settings.seed), "--profile-modes", str(settings.profile_modes)),
            *("--reference", settings.reference),
        ]
        if settings.clients is not None:
            command += ["--clients", str(settings.clients)]
        if settings.deadline_s is not None:
            command += ["--deadline-s", str(settings.deadline_s)]
        part = self._parts.start("coordinator", command, OFFLINE)
        give_up_s = time.monotonic() + _READY_WITHIN_S
        while not announced.exists():
            if failure := part.failure():
                raise failure
            if time.monotonic() > give_up_s:
                raise PartFailedError(f"the coordinator did not start within {_READY_WITHIN_S:g} s (log: {part.log})")
            time.sleep(0.1)
        return identities.serving_at(str(json.loads(announced.read_text())["address"]))

    def start_agents(self, coordinator: Endpoint, boards: Mapping[str, str]) -> None:
        """Enrol every device and Flower's server, and start the agents.

        Args:
            coordinator: endpoint for the operator, who creates the invites.
            boards: each device's kind of board, by device id.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            InvalidInputError: the coordinator refuses an enrolment.
        """
        with CoordinatorClient(coordinator) as client:
            enrol_flower(client, self.flower_identity)
            for device in self._settings.devices:
                enrol_device(
                    client, device.device_id, boards[device.device_id], state_directory(self._scratch, device.device_id)
                )
                self._start_agent(device, coordinator.address)

    def socket(self, device_id: str) -> Path:
        """Return the unix socket of a device's agent."""
        return self._scratch / f"{device_id}.sock"

    def nodes(self) -> list[SuperNodeConfig]:
        """Return the SuperNodes of the devices. They are enrolled with the agents."""
        return [
            SuperNodeConfig(
                device.device_id,
                device.partition,
                self.socket(device.device_id),
                state_directory(self._scratch, device.device_id) / SUPERNODE_DIRECTORY,
            )
            for device in self._settings.devices
        ]

    def _start_agent(self, device: FleetDevice, address: str) -> None:
        self._parts.start(
            f"agent-{device.device_id}",
            [
                program("wattfleet"),
                *("agent", "run", "--device", device.spec, "--device-id", device.device_id),
                *("--seed", str(device.seed), "--coordinator", address),
                *("--state-dir", str(state_directory(self._scratch, device.device_id))),
                *("--socket", str(self.socket(device.device_id))),
                *self._duty_options(device),
            ],
            OFFLINE,
        )

    def _duty_options(self, device: FleetDevice) -> list[str]:
        if device.duty is None:
            return []
        # A device that answers requests measures no modes during trainings.
        ahead = min(_MODES_BESIDE_DUTY, self._settings.profile_modes)
        return ["--simulated-duty", device.duty, "--modes-first", str(ahead)]
