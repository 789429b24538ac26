"""The agent's settings: options of `wattfleet agent run`, environment variables and a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from edge_agent.paths import DEFAULT_STATE_DIRECTORY, IDENTITY_DIRECTORY
from edge_agent.workloads.loading import SHIPPED, Processor
from wattfleet.common.identity.channels import DEFAULT_ADDRESS, Endpoint, require_identity
from wattfleet.common.identity.peers import Role
from wattfleet.common.settings.model import Group, LogSettings, Settings, setting
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import LARGEST_COUNT
from wattfleet_proto.names import DEFAULT_SOCKET


class DeviceSettings(Group):
    """Device: its name, its board and its files."""

    spec: str = setting(
        ...,
        "Select the device: auto (detect), sysfs, sysfs:<folder>, nvpmodel, jtop, host, simulated:<kind> or"
        " replay:<file>.csv. See docs/devices.md.",
        option="--device",
    )
    id: str = setting(..., "Set the device's unique name in the fleet.", option="--device-id", min_length=1)
    state_dir: Path = setting(
        Path(DEFAULT_STATE_DIRECTORY),
        "Keep the profile, reference, predictor and unsent reports in this directory.",
        option="--state-dir",
    )
    socket: Path = setting(Path(DEFAULT_SOCKET), "Serve Flower's ClientApp on this unix socket.", option="--socket")
    socket_group: str | None = setting(
        None,
        "Let the members of this group train through the socket, in addition to root and the agent's own user.",
        option="--socket-group",
        unset="the group with which the agent runs; in the service, it is wattfleet",
        min_length=1,
    )
    seed: int = setting(0, "Set the random seed for choosing modes and for a simulated board.", option="--seed", ge=0)

    simulated_duty: str | None = setting(
        None,
        "Let a simulated board answer simulated requests beside its trainings: network:requests per second:latency "
        "in ms, such as mobilenetv3:60:500. Append a share such as :0.99 if it is not 95 % of the requests. See "
        "docs/duties.md.",
        option="--simulated-duty",
        unset="none",
    )


class ProfileSettings(Group):
    """Profile: how many modes are measured, and when."""

    minibatches_per_epoch: int | None = setting(
        None,
        "Assume this number of minibatches in one pass over the device's data, for a run that names no workload, "
        "until its data loader reports the number.",
        option="--minibatches-per-epoch",
        unset="100",
        ge=1,
    )
    modes_first: int | None = setting(
        None,
        "Measure this number of modes before the first round: of --workload on hardware, and of each announced "
        "workload on a virtual board; at most the coordinator's number of modes. More modes are measured while apps "
        "train.",
        option="--modes-first",
        unset="none",
        ge=0,
    )
    tolerance: float = setting(
        0.01,
        "Stop early if no further mode is expected to shorten a training step by more than this share, under any"
        " budget. 0 never stops early.",
        option="--tolerance",
        ge=0,
        lt=1,
    )
    inference_modes: int = setting(
        6,
        "Measure the inference of a duty in this number of power modes, with two batch sizes each, once it has "
        "answered requests. Modes with rows passed with the duty are included. 0 measures none.",
        option="--inference-modes",
        ge=0,
        le=1_000,
    )


class WorkloadSettings(Group):
    """Workload: the training for measuring modes without an app, and limits on the stored workloads."""

    name: str | None = setting(
        None,
        f"Set the workload that --modes-first measures on hardware: {', '.join(SHIPPED)}, or your own module:function.",
        option="--workload",
        unset="none",
    )
    minibatch: int = setting(
        16, "Set this workload's minibatch size, in samples.", option="--minibatch", ge=1, le=LARGEST_COUNT
    )
    processor: Processor = setting("cuda", "Set where this workload computes.", option="--processor")
    max_workloads: int = setting(
        32,
        "Store at most this number of workloads. The least recently used are removed, except for announced ones.",
        option="--max-workloads",
        ge=2,
    )
    max_state_mb: float = setting(
        64.0,
        "Store at most this amount for all workloads. The least recently used are removed.",
        unit="MB",
        option="--max-state-mb",
        gt=0,
    )


class ConnectionSettings(Group):
    """Session: the connection to the coordinator."""

    coordinator: str | None = setting(
        None,
        "Connect to the coordinator at this address, host:port.",
        option="--coordinator",
        unset=f"the address of the enrolment, else {DEFAULT_ADDRESS}",
    )
    identity: Path | None = setting(
        None,
        "Connect with the key and the certificate in this folder, which `wattfleet agent join` fills.",
        option="--identity",
        unset=f"the folder {IDENTITY_DIRECTORY} in the state directory",
    )
    insecure: bool = setting(
        False,
        "Connect in plaintext, even to another machine, if there is no identity. Anybody on the network can then "
        "read and change everything.",
        option="--insecure",
    )
    silence_timeout_s: float = setting(
        15.0, "Reconnect after this time without any answer, or after three leases if that is longer.", unit="s", gt=0
    )
    stop_timeout_s: float = setting(
        300.0,
        "Wait this long for an app to end its training after a stop. The device is parked at once; after this time, "
        "it is free for other trainings.",
        unit="s",
        gt=0,
    )
    reference_retry_s: float = setting(
        300.0,
        "Check refused references again after about this time. Earlier ones stay in force meanwhile.",
        unit="s",
        gt=0,
    )


class MetricsSettings(Group):
    """Metrics: figures of this device, which Prometheus reads directly from the device (docs/metrics.md)."""

    address: str | None = setting(
        None,
        "Serve Prometheus metrics of this device on this host:port, such as 127.0.0.1:9466. On an address that other "
        "machines can reach, viewers and operators read them over TLS.",
        option="--metrics-address",
        unset="nowhere",
    )


class AgentSettings(Settings):
    """All settings of an agent."""

    prefix: ClassVar[str] = "WATTFLEET_AGENT_"

    device: DeviceSettings
    profile: ProfileSettings = ProfileSettings()
    workload: WorkloadSettings = WorkloadSettings()
    session: ConnectionSettings = ConnectionSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @property
    def identity_folder(self) -> Path:
        """The folder of the agent's identity, which may be empty."""
        return self.session.identity or self.device.state_dir / IDENTITY_DIRECTORY

    def endpoint(self) -> Endpoint:
        """The coordinator's address and how to connect to it.

        Raises:
            InvalidInputError: the address is invalid; a named identity is absent, is damaged, or is that of another
                device; or plaintext would leave this machine although that is not allowed.
        """
        if self.session.identity is not None:
            require_identity(self.session.identity)
        endpoint = Endpoint.of(self.session.coordinator, self.identity_folder, self.session.insecure)
        if (identity := endpoint.identity()) is not None:
            peer = identity.peer
            if (peer.role, peer.name) != (Role.DEVICE, self.device.id):
                raise InvalidInputError(
                    f"the certificate in {self.identity_folder} is for {peer}, not for device {self.device.id}: pass"
                    " that device's id as --device-id, or enrol again with `wattfleet agent join`"
                )
        return endpoint
