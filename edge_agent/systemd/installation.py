"""Plans and performs the installation and removal of the agent's service."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from edge_agent.devices.selection import is_virtual
from edge_agent.exporter import is_exposed as metrics_exposed
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, IDENTITY_DIRECTORY
from edge_agent.workloads.loading import Processor
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.channels import is_loopback
from wattfleet.common.identity.identity_folder import read_identity
from wattfleet.common.systemd import (
    SETTINGS_FOLDER,
    UNIT_FOLDER,
    Installation,
    InstalledCode,
    Stat,
    unit_of,
)
from wattfleet.core.errors import InvalidInputError

UNIT_FILE = "wattfleet-agent.service"
"""The unit, beside this module."""

UNIT_PATH = f"{UNIT_FOLDER}/{UNIT_FILE}"
SETTINGS_PATH = f"{SETTINGS_FOLDER}/agent.env"
GROUP = "wattfleet"

_INSECURE = "WATTFLEET_AGENT_SESSION_INSECURE"
"""The environment variable that `wattfleet agent run` reads for `--insecure`."""

_METRICS_ADDRESS = "WATTFLEET_AGENT_METRICS_ADDRESS"
"""The environment variable that it reads for `--metrics-address`."""


@dataclass(frozen=True)
class ServiceSettings:
    """The settings with which the service runs its agent.

    Attributes:
        device: the device as named on the command line.
        device_id: its name in the fleet.
        coordinator: host:port.
        processor: where the workloads of ordered measurements compute.
        is_insecure: whether plaintext may leave the machine while it has no identity.
        metrics_address: host:port on which the agent serves metrics; None for none.

    Raises:
        InvalidInputError: a value is invalid, or cannot be stored in the settings file.
    """

    device: str
    device_id: str
    coordinator: str
    processor: Processor = "cuda"
    is_insecure: bool = False
    metrics_address: str | None = None

    def __post_init__(self) -> None:
        split_address(self.coordinator)
        if self.metrics_address is not None:
            split_address(self.metrics_address)
        values = {
            "device": self.device,
            "device id": self.device_id,
            "coordinator": self.coordinator,
            "metrics address": self.metrics_address or "none",
        }
        for name, value in values.items():
            if not re.fullmatch(r"[\w.:/@+\[\]-]+", value):
                raise InvalidInputError(f"{name} {value!r}: use letters, digits and . : / @ + - _ [ ] only")

    def text(self) -> str:
        """Return the content of the settings file in systemd's format."""
        workload = "" if is_virtual(self.device) else f"--processor {self.processor}"
        optional = f"{_INSECURE}=true\n" if self.is_insecure else ""
        if self.metrics_address is not None:
            optional += f"{_METRICS_ADDRESS}={self.metrics_address}\n"
        return (
            "# Settings of wattfleet-agent.service. To apply a change, run `systemctl restart wattfleet-agent`.\n"
            f"WATTFLEET_DEVICE={self.device}\n"
            f"WATTFLEET_DEVICE_ID={self.device_id}\n"
            f"WATTFLEET_COORDINATOR={self.coordinator}\n"
            f"WATTFLEET_WORKLOAD={workload}\n"
            f"{optional}"
        )

    def is_exposed(self, root: Path) -> bool:
        """Return whether the service's connection leaves the machine in plaintext.

        Args:
            root: root of the machine's files; `/` on the machine itself.

        Raises:
            InvalidInputError: plaintext would leave the machine although that is not allowed, or the machine's identity
                is damaged.
        """
        folder = root / DEFAULT_STATE_DIRECTORY.lstrip("/") / IDENTITY_DIRECTORY
        if self.metrics_address is not None:
            metrics_exposed(self.metrics_address, folder, self.is_insecure)
        if is_loopback(split_address(self.coordinator)[0]) or read_identity(folder) is not None:
            return False
        if not self.is_insecure:
            raise InvalidInputError(
                f"{self.coordinator} is another machine's address, and {folder} has no identity to protect the "
                f"connection: first enrol this device with `wattfleet agent join` and the line from `wattfleet "
                f"coordinator invite`, or pass --insecure for plaintext"
            )
        return True


@dataclass(frozen=True)
class InstalledConnection:
    """The addresses of the installed service's coordinator and metrics.

    Attributes:
        coordinator: host:port; empty for the coordinator of the enrolment.
        is_insecure: whether plaintext may leave the machine while it has no identity.
        metrics_address: host:port of its metrics; empty for none.
    """

    coordinator: str
    is_insecure: bool
    metrics_address: str = ""

    @classmethod
    def read(cls, root: Path) -> InstalledConnection | None:
        """Read the addresses from the settings file; None if no service is installed, or the file cannot be read.

        Args:
            root: root of the machine's files; `/` on the machine itself.
        """
        try:
            lines = (root / SETTINGS_PATH.lstrip("/")).read_text(errors="replace").splitlines()
        except OSError:
            return None
        values = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        is_insecure = values.get(_INSECURE, "false").lower() == "true"
        return cls(values.get("WATTFLEET_COORDINATOR", ""), is_insecure, values.get(_METRICS_ADDRESS, ""))

    @property
    def leaves_machine(self) -> bool:
        """Return whether the coordinator is on another machine."""
        return bool(self.coordinator) and not is_loopback(split_address(self.coordinator)[0])


def installation(
    settings: ServiceSettings, code: InstalledCode, look_at: Stat = os.stat, allow_writable: bool = False
) -> Installation:
    """Plan an installation.

    Args:
        settings: how the agent runs.
        code: the installed `wattfleet` and the code that it imports.
        look_at: returns a file's status; tests replace `os.stat`.
        allow_writable: whether to allow code that users other than root can change, and thereby become root.

    Raises:
        InvalidInputError: the service cannot or must not run that program.
    """
    shipped = files(__package__).joinpath(UNIT_FILE).read_text(encoding="utf-8")
    unit, writable = unit_of(shipped, code, look_at, allow_writable)
    files_ = {SETTINGS_PATH: settings.text(), UNIT_PATH: unit}
    return Installation(UNIT_FILE, files_, [["groupadd", "--system", "--force", GROUP]], writable)
