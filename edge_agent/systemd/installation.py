"""Plans and performs the installation and removal of the agent's service."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from edge_agent.devices.jetson.programs import RunProgram
from edge_agent.devices.selection import is_virtual
from edge_agent.exporter.protection import is_exposed as metrics_exposed
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, IDENTITY_DIRECTORY
from edge_agent.systemd.ownership import InstalledCode, Stat
from edge_agent.workloads.loading import Processor, require_workload
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_identity.channels import is_loopback
from wattfleet_identity.identity_folder import read_identity
from wattfleet_io.addresses import split_address
from wattfleet_io.atomic_files import remove_file, replace_file

UNIT_FILE = "wattfleet-agent.service"
"""The unit, beside this module."""

UNIT_PATH = f"/etc/systemd/system/{UNIT_FILE}"
SETTINGS_PATH = "/etc/wattfleet/agent.env"
GROUP = "wattfleet"

_INSECURE = "WATTFLEET_AGENT_SESSION_INSECURE"
"""What `wattfleet agent run` takes from the environment for `--insecure`."""

_METRICS_ADDRESS = "WATTFLEET_AGENT_METRICS_ADDRESS"
"""What it takes for `--metrics-address`."""

_SHIPPED_PROGRAM = "/opt/wattfleet/bin/wattfleet"
_INSTALL_AS_ROOT = f"install Wattfleet as root into a virtual environment such as {Path(_SHIPPED_PROGRAM).parents[1]}"
# Hidden from the service by the unit's ProtectHome and PrivateTmp.
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")


class InstallationError(WattfleetError):
    """A step of the installation failed; earlier steps are done."""


@dataclass(frozen=True)
class ServiceSettings:
    """How the service runs its agent.

    Attributes:
        device: the device as the command line names it.
        device_id: its name in the fleet.
        coordinator: host:port.
        minibatches_per_epoch: minibatches of one pass over the device's data; None to let each app's loader tell it.
        workload: the workload to measure with besides the apps; None for none.
        minibatch: samples in a minibatch of the workload.
        processor: where it computes.
        is_insecure: whether plaintext may leave the machine while it has no identity.
        metrics_address: host:port on which the agent serves metrics; None for none.

    Raises:
        InvalidInputError: a value is invalid, or cannot be stored in the settings file.
    """

    device: str
    device_id: str
    coordinator: str
    minibatches_per_epoch: int | None = None
    workload: str | None = None
    minibatch: int = 16
    processor: Processor = "cuda"
    is_insecure: bool = False
    metrics_address: str | None = None

    def __post_init__(self) -> None:
        split_address(self.coordinator)
        if self.metrics_address is not None:
            split_address(self.metrics_address)
        if self.workload is not None:
            require_workload(self.workload, self.minibatch)
            if is_virtual(self.device):
                raise InvalidInputError(f"the device {self.device} needs no workload; omit --workload")
        if self.minibatches_per_epoch is not None and self.minibatches_per_epoch < 1:
            raise InvalidInputError(f"--minibatches-per-epoch must be at least 1, not {self.minibatches_per_epoch}")
        values = {
            "device": self.device,
            "device id": self.device_id,
            "coordinator": self.coordinator,
            "workload": self.workload or "none",
            "metrics address": self.metrics_address or "none",
        }
        for name, value in values.items():
            if not re.fullmatch(r"[\w.:/@+\[\]-]+", value):
                raise InvalidInputError(f"{name} {value!r}: use letters, digits and . : / @ + - _ [ ] only")

    def text(self) -> str:
        """The settings file, as systemd reads it."""
        optional = f"{_INSECURE}=true\n" if self.is_insecure else ""
        if self.metrics_address is not None:
            optional += f"{_METRICS_ADDRESS}={self.metrics_address}\n"
        return (
            "# Settings of wattfleet-agent.service. To apply a change, run `systemctl restart wattfleet-agent`.\n"
            f"WATTFLEET_DEVICE={self.device}\n"
            f"WATTFLEET_DEVICE_ID={self.device_id}\n"
            f"WATTFLEET_COORDINATOR={self.coordinator}\n"
            f"WATTFLEET_WORKLOAD={' '.join(self._workload_options())}\n"
            f"{optional}"
        )

    def is_exposed(self, root: Path) -> bool:
        """Whether the service's connection leaves the machine in plaintext.

        Args:
            root: root of the machine's files; `/` on the machine itself.

        Raises:
            InvalidInputError: it would although it must not, or the machine's identity is damaged.
        """
        folder = root / DEFAULT_STATE_DIRECTORY.lstrip("/") / IDENTITY_DIRECTORY
        if self.metrics_address is not None:
            metrics_exposed(self.metrics_address, folder, self.is_insecure)
        if is_loopback(split_address(self.coordinator)[0]) or read_identity(folder) is not None:
            return False
        if not self.is_insecure:
            raise InvalidInputError(
                f"{self.coordinator} is another machine's address, and {folder} has no identity to protect the"
                " connection: enrol this device first with `wattfleet agent join` and the line of `wattfleet"
                " coordinator invite`, or pass --insecure for plaintext"
            )
        return True

    def _workload_options(self) -> Iterator[str]:
        if self.minibatches_per_epoch is not None:
            yield f"--minibatches-per-epoch {self.minibatches_per_epoch}"
        if self.workload is not None:
            yield f"--workload {self.workload} --minibatch {self.minibatch}"
        if not is_virtual(self.device):
            yield f"--processor {self.processor}"  # also where an ordered measurement computes


@dataclass(frozen=True)
class InstalledConnection:
    """How the installed service connects to its coordinator, and serves its metrics.

    Attributes:
        coordinator: host:port; empty for that of the enrolment.
        is_insecure: whether plaintext may leave the machine while it has no identity.
        metrics_address: host:port of its metrics; empty for none.
    """

    coordinator: str
    is_insecure: bool
    metrics_address: str = ""

    @classmethod
    def read(cls, root: Path) -> InstalledConnection | None:
        """Read it from the settings file; None if no service is installed, or the file cannot be read.

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
        """Whether the coordinator is on another machine."""
        return bool(self.coordinator) and not is_loopback(split_address(self.coordinator)[0])


@dataclass(frozen=True)
class InstallationPlan:
    """The planned installation.

    Attributes:
        files: content of each file, by path on the machine.
        commands: commands to run afterwards, in order.
        writable: a part of the service's code that users other than root may write, if that was allowed.
    """

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    writable: Path | None = None

    def write_files(self, root: Path) -> None:
        """Write the files.

        Args:
            root: root of the machine's files; `/` on the machine itself.

        Raises:
            InstallationError: one cannot be written.
        """
        for path, content in self.files.items():
            place = root / path.lstrip("/")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                replace_file(place, content.encode())
            except OSError as error:
                raise InstallationError(f"{place}: cannot be written: {error.strerror}; install as root") from None

    def run_commands(self, run: RunProgram) -> None:
        """Run the commands.

        Raises:
            InstallationError: one failed; earlier ones were run.
        """
        run_all(self.commands, run)


@dataclass(frozen=True)
class RemovalPlan:
    """The planned removal of the service.

    Attributes:
        before: commands that stop it, which restores the device.
        files: files to remove then, by path on the machine.
        after: commands that make systemd forget it.
    """

    before: tuple[tuple[str, ...], ...]
    files: tuple[str, ...]
    after: tuple[tuple[str, ...], ...]

    def present(self, root: Path) -> list[Path]:
        """The files that exist.

        Args:
            root: root of the machine's files; `/` on the machine itself.
        """
        places = [root / path.lstrip("/") for path in self.files]
        return [place for place in places if place.exists()]

    def remove_files(self, root: Path) -> None:
        """Remove the files that exist.

        Raises:
            InstallationError: one cannot be removed.
        """
        for place in self.present(root):
            try:
                remove_file(place)
            except OSError as error:
                raise InstallationError(f"{place}: cannot be removed: {error.strerror}; uninstall as root") from None


def run_all(commands: Sequence[Sequence[str]], run: RunProgram) -> None:
    """Run commands one after the other.

    Raises:
        InstallationError: one failed; earlier ones were run.
    """
    for command in commands:
        result = run(command, "")
        if result.code != 0:
            raise InstallationError(f"{' '.join(command)}: {result.output.strip() or f'exit status {result.code}'}")


@dataclass(frozen=True)
class CodeProblem:
    """Why the service cannot or must not run the installed code.

    Attributes:
        found: what is wrong.
        remedy: what to do.
        writable: a part of the code that users other than root may write, if that is the problem: it may be allowed.
    """

    found: str
    remedy: str
    writable: Path | None = None


def code_problem(code: InstalledCode, look_at: Stat = os.stat) -> CodeProblem | None:
    """Why `installation` refuses the installed code; None if it does not. This may take seconds.

    Args:
        code: the installed `wattfleet` and the code that it imports.
        look_at: `os.stat` except in tests.

    Raises:
        InvalidInputError: a part cannot be read.
    """
    program = code.program
    for part in (program, *code.interpreter, *code.imported):
        if any(str(path).startswith(_HIDDEN) for path in (part, part.resolve())):
            return CodeProblem(
                f"{part}: is in a home or temporary directory, which the service cannot see and whose owner could"
                " become root",
                f"{_INSTALL_AS_ROOT}, with the system's own Python",
            )
    if not program.exists():
        return CodeProblem(f"{program}: does not exist", "install Wattfleet with pip, and run its own `wattfleet`")
    writable = code.writable_by_others(look_at)
    if writable is None:
        return None
    found = f"{program}: users other than root can write {writable}, and so become root"
    return CodeProblem(found, _INSTALL_AS_ROOT, writable)


def installation(
    settings: ServiceSettings, code: InstalledCode, look_at: Stat = os.stat, allow_writable: bool = False
) -> InstallationPlan:
    """Plan an installation.

    Args:
        settings: how the agent runs.
        code: the installed `wattfleet` and the code that it imports.
        look_at: `os.stat` except in tests.
        allow_writable: whether to allow code that users other than root may write, and so become root.

    Raises:
        InvalidInputError: the service cannot or must not run that program.
    """
    problem = code_problem(code, look_at)
    writable = None if problem is None else problem.writable
    if problem is not None and (writable is None or not allow_writable):
        way_out = "" if writable is None else ", or pass --allow-writable"
        raise InvalidInputError(f"{problem.found}; {problem.remedy}{way_out}")
    unit = files(__package__).joinpath(UNIT_FILE).read_text(encoding="utf-8")
    return InstallationPlan(
        files={SETTINGS_PATH: settings.text(), UNIT_PATH: unit.replace(_SHIPPED_PROGRAM, str(code.program))},
        commands=(
            ("groupadd", "--system", "--force", GROUP),
            ("systemctl", "daemon-reload"),
            ("systemctl", "enable", UNIT_FILE),
            ("systemctl", "restart", UNIT_FILE),
        ),
        writable=writable,
    )


def removal() -> RemovalPlan:
    """Plan the removal of the service; profile, predictor and the group are kept."""
    return RemovalPlan(
        before=(("systemctl", "disable", "--now", UNIT_FILE),),
        files=(UNIT_PATH, SETTINGS_PATH),
        after=(("systemctl", "daemon-reload"),),
    )


def changes(plan: InstallationPlan, root: Path) -> Sequence[tuple[str, str]]:
    """Each file with its change: write, replace or keep."""
    return [(path, _change(root / path.lstrip("/"), content)) for path, content in plan.files.items()]


def _change(place: Path, content: str) -> str:
    if not place.exists():
        return "write"
    return "keep" if place.read_text(encoding="utf-8") == content else "replace"
