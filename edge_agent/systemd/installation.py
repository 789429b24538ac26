"""What makes a machine start the agent by itself: planned first, shown, and then done."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from edge_agent.devices.jetson.programs import RunProgram
from edge_agent.devices.selection import is_virtual
from edge_agent.systemd.ownership import InstalledCode, Stat
from edge_agent.workloads.loading import SHIPPED, Processor, require_workload
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.addresses import split_address
from wattfleet_io.atomic_files import remove_file, replace_file

UNIT_FILE = "wattfleet-agent.service"
"""The unit, beside this module."""

UNIT_PATH = f"/etc/systemd/system/{UNIT_FILE}"
SETTINGS_PATH = "/etc/wattfleet/agent.env"
GROUP = "wattfleet"

_SHIPPED_PROGRAM = "/opt/wattfleet/bin/wattfleet"
_INSTALL_AS_ROOT = f"install Wattfleet as root into a virtual environment such as {Path(_SHIPPED_PROGRAM).parents[1]}"
# What the unit's ProtectHome and PrivateTmp hide from it.
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")


class InstallationError(WattfleetError):
    """A step of the installation failed; the steps before it are done."""


@dataclass(frozen=True)
class ServiceSettings:
    """How the service runs its agent.

    Attributes:
        device: the device as the command line names it.
        device_id: its name in the fleet.
        coordinator: host:port.
        minibatches_per_epoch: minibatches of one pass over the device's data.
        workload: what the device is measured with; None for a board that is not there, which trains by itself.
        minibatch: samples in a minibatch of the workload.
        processor: where it computes.

    Raises:
        InvalidInputError: a value that no settings file can hold, or that the agent would refuse.
    """

    device: str
    device_id: str
    coordinator: str
    minibatches_per_epoch: int
    workload: str | None = None
    minibatch: int = 16
    processor: Processor = "cuda"

    def __post_init__(self) -> None:
        split_address(self.coordinator)
        if self.workload is not None:
            require_workload(self.workload, self.minibatch)
        if is_virtual(self.device) != (self.workload is None):
            raise InvalidInputError(
                f"the device {self.device} trains by itself: leave out --workload"
                if self.workload is not None
                else f"the device {self.device} is measured by training on it: name a --workload, one of"
                f" {', '.join(SHIPPED)}, or your own module:function"
            )
        if self.minibatches_per_epoch < 1:
            raise InvalidInputError("an agent needs at least one minibatch per epoch")
        values = {
            "device": self.device,
            "device id": self.device_id,
            "coordinator": self.coordinator,
            "workload": self.workload or "none",
        }
        for name, value in values.items():
            if not re.fullmatch(r"[\w.:/@+\[\]-]+", value):
                raise InvalidInputError(f"{name} {value!r}: use letters, digits and . : / @ + - _ [ ] only")

    def text(self) -> str:
        """The settings as systemd reads them."""
        return (
            "# Settings of wattfleet-agent.service; `systemctl restart wattfleet-agent` makes a change take effect.\n"
            f"WATTFLEET_DEVICE={self.device}\n"
            f"WATTFLEET_DEVICE_ID={self.device_id}\n"
            f"WATTFLEET_COORDINATOR={self.coordinator}\n"
            f"WATTFLEET_MINIBATCHES_PER_EPOCH={self.minibatches_per_epoch}\n"
            f"WATTFLEET_WORKLOAD={self._workload_options()}\n"
        )

    def _workload_options(self) -> str:
        if self.workload is None:
            return ""
        return f"--workload {self.workload} --minibatch {self.minibatch} --processor {self.processor}"


@dataclass(frozen=True)
class InstallationPlan:
    """What is to be done.

    Attributes:
        files: what each file is to hold, by path on the machine.
        commands: what is to be run afterwards, in order.
        writable: what others than root may write of the service's code, where that was allowed.
    """

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    writable: Path | None = None

    def write_files(self, root: Path) -> None:
        """Write the files.

        Args:
            root: where the machine's files are, `/` on the machine itself.

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
            InstallationError: one failed; those before it were run.
        """
        run_all(self.commands, run)


@dataclass(frozen=True)
class RemovalPlan:
    """What takes the service away again.

    Attributes:
        before: commands that end it, and with it put the device back.
        files: what is removed then, by path on the machine.
        after: commands that make systemd forget it.
    """

    before: tuple[tuple[str, ...], ...]
    files: tuple[str, ...]
    after: tuple[tuple[str, ...], ...]

    def present(self, root: Path) -> list[Path]:
        """Those of the files that are there.

        Args:
            root: where the machine's files are, `/` on the machine itself.
        """
        places = [root / path.lstrip("/") for path in self.files]
        return [place for place in places if place.exists()]

    def remove_files(self, root: Path) -> None:
        """Remove the files that are there.

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
        InstallationError: one failed; those before it were run.
    """
    for command in commands:
        result = run(command, "")
        if result.code != 0:
            raise InstallationError(f"{' '.join(command)}: {result.output.strip() or f'exit status {result.code}'}")


def installation(
    settings: ServiceSettings, code: InstalledCode, look_at: Stat = os.stat, allow_writable: bool = False
) -> InstallationPlan:
    """Plan an installation.

    Args:
        settings: how the agent is to run.
        code: the installed `wattfleet`, and what runs with it.
        look_at: `os.stat` outside of tests.
        allow_writable: whether others than root may write that, and so become root.

    Raises:
        InvalidInputError: the service could not run that program, or must not.
    """
    program = code.program
    for part in (program, *code.interpreter, *code.imported):
        if any(str(path).startswith(_HIDDEN) for path in (part, part.resolve())):
            raise InvalidInputError(
                f"{part}: lies in a home or a temporary directory, which the service cannot see and whose owner would"
                f" become root: {_INSTALL_AS_ROOT}, with the system's own Python"
            )
    if not program.exists():
        raise InvalidInputError(f"{program}: no such program: install Wattfleet with pip, and run its own `wattfleet`")
    writable = code.writable_by_others(look_at)
    if writable is not None and not allow_writable:
        raise InvalidInputError(
            f"{program}: others than root may write {writable}, and would become root: {_INSTALL_AS_ROOT};"
            " --allow-writable installs it all the same"
        )
    unit = files(__package__).joinpath(UNIT_FILE).read_text(encoding="utf-8")
    return InstallationPlan(
        files={SETTINGS_PATH: settings.text(), UNIT_PATH: unit.replace(_SHIPPED_PROGRAM, str(program))},
        commands=(
            ("groupadd", "--system", "--force", GROUP),
            ("systemctl", "daemon-reload"),
            ("systemctl", "enable", UNIT_FILE),
            ("systemctl", "restart", UNIT_FILE),
        ),
        writable=writable,
    )


def removal() -> RemovalPlan:
    """Plan to take an installation away; profile, predictor and the group stay."""
    return RemovalPlan(
        before=(("systemctl", "disable", "--now", UNIT_FILE),),
        files=(UNIT_PATH, SETTINGS_PATH),
        after=(("systemctl", "daemon-reload"),),
    )


def changes(plan: InstallationPlan, root: Path) -> Sequence[tuple[str, str]]:
    """Each file with what happens to it: written, replaced, or left as it is."""
    return [(path, _change(root / path.lstrip("/"), content)) for path, content in plan.files.items()]


def _change(place: Path, content: str) -> str:
    if not place.exists():
        return "write"
    return "leave as it is" if place.read_text(encoding="utf-8") == content else "replace"
