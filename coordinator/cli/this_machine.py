"""Finds the coordinators of this machine: their operators' identities, and the addresses at which they serve operators.

A coordinator notes its address in the lock file of its store, and in its first operator's identity. Its settings say
where these are. They are read without pydantic, since the operator's commands also work without the extra
`coordinator`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.lock_file import noted_address
from wattfleet.errors import InvalidInputError
from wattfleet_identity.endpoint import OPERATOR_FOLDER
from wattfleet_io.addresses import reachable_here
from wattfleet_io.parsing import parse_toml

PREFIX = "WATTFLEET_COORDINATOR_"
INSTALLED_SETTINGS, INSTALLED_FOLDER = Path("/etc/wattfleet/coordinator.toml"), Path("/var/lib/wattfleet-coordinator")
"""Equal to those of `coordinator.systemd.installation`, which imports the settings."""
DEFAULTS = {
    ("identity", "directory"): str(OPERATOR_FOLDER.parent),
    ("store", "location"): "wattfleet-coordinator.db",
    ("server", "address"): "",
    ("identity", "operator_address"): "",
}
"""The settings that are read; an address is empty if it is not set. Equal to those of `coordinator.settings`."""


@dataclass(frozen=True)
class LocalCoordinator:
    """What the settings of a coordinator on this machine say.

    Attributes:
        folder: the folder in which it runs.
        file: its settings file; None without one.
        variables: its environment variables.
    """

    folder: Path
    file: Path | None
    variables: Mapping[str, str]

    @property
    def operator_folder(self) -> Path:
        """The folder of its first operator's identity."""
        return self.folder / self._setting("identity", "directory")[0] / OPERATOR_FOLDER.name

    def address(self) -> tuple[str, str] | None:
        """Return the host:port at which it serves operators, and how that is known; None if it is unknown."""
        store = self._setting("store", "location")[0].removeprefix("sqlite:///")
        if "://" not in store and (noted := noted_address(self.folder / store)) is not None:
            return noted, f"where the coordinator of {self.folder / store} served last"
        for group, key in (("identity", "operator_address"), ("server", "address")):
            configured, origin = self._setting(group, key)
            try:
                address = reachable_here(configured)
            except InvalidInputError:
                continue
            if not address.endswith(":0"):
                return address, f"as {origin} says"
        return None

    def _setting(self, group: str, key: str) -> tuple[str, str]:
        """Return a setting, and the variable or file that has set it."""
        variable = f"{PREFIX}{group}_{key}".upper()
        if value := self.variables.get(variable):
            return value, variable
        table = self._tables().get(group)
        value = table.get(key) if isinstance(table, dict) else None
        return (value, str(self.file)) if isinstance(value, str) else (DEFAULTS[group, key], "")

    def _tables(self) -> dict[str, Any]:
        try:
            return {} if self.file is None else parse_toml(self.file.read_bytes())
        except (OSError, ValueError):  # the command can do without; `serve` explains what is wrong with the file
            return {}


def local_coordinators() -> Iterator[LocalCoordinator]:
    """Return the coordinator of the current folder, then that of the installed service if this user may read it."""
    named = os.environ.get(f"{PREFIX}CONFIG")
    yield LocalCoordinator(Path(), Path(named) if named else None, os.environ)
    if os.access(INSTALLED_SETTINGS, os.R_OK) and os.access(INSTALLED_FOLDER, os.R_OK | os.X_OK):
        yield LocalCoordinator(INSTALLED_FOLDER, INSTALLED_SETTINGS, {})
