"""Plans the installation and removal of a systemd service: its files and the commands to run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_io.atomic_files import remove_file, replace_file
from wattfleet_io.programs import RunProgram
from wattfleet_io.systemd.ownership import InstalledCode, Stat

UNIT_FOLDER = "/etc/systemd/system"
SETTINGS_FOLDER = "/etc/wattfleet"

_SHIPPED_PROGRAM = "/opt/wattfleet/bin/wattfleet"
_INSTALL_AS_ROOT = f"install Wattfleet as root into a virtual environment such as {Path(_SHIPPED_PROGRAM).parents[1]}"
# Hidden from the service by the unit's ProtectHome and PrivateTmp.
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")


class InstallationError(WattfleetError):
    """A step of the installation failed; earlier steps are done."""


@dataclass(frozen=True)
class InstallationPlan:
    """The planned installation.

    Attributes:
        files: the content of each file, by path on the machine.
        commands: commands to run afterwards, in order.
        writable: a part of the service's code that users other than root can change, if that was allowed.
        shown: text to print instead of a file's content, by path, for people and as JSON.
        modes: permissions of files that are not readable for everybody, by path.
    """

    files: dict[str, str]
    commands: tuple[tuple[str, ...], ...]
    writable: Path | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)

    def changes(self, root: Path) -> Sequence[tuple[str, str]]:
        """Return each file with its change: write, replace or keep."""
        return [(path, _change(root / path.lstrip("/"), content)) for path, content in self.files.items()]

    def write_files(self, root: Path) -> None:
        """Write the files.

        Args:
            root: root of the machine's files; `/` on the machine itself.

        Raises:
            InstallationError: a file cannot be written.
        """
        for path, content in self.files.items():
            place = root / path.lstrip("/")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                replace_file(place, content.encode(), mode=self.modes.get(path, 0o644))
            except OSError as error:
                raise InstallationError(f"{place}: cannot be written: {error.strerror}; install as root") from None

    def run_commands(self, run: RunProgram) -> None:
        """Run the commands.

        Raises:
            InstallationError: a command failed; earlier ones were run.
        """
        run_all(self.commands, run)


@dataclass(frozen=True)
class RemovalPlan:
    """The planned removal of the service.

    Attributes:
        before: commands that stop it, which restores the device.
        files: files to remove after that, by path on the machine.
        after: commands that make systemd forget it.
    """

    before: tuple[tuple[str, ...], ...]
    files: tuple[str, ...]
    after: tuple[tuple[str, ...], ...]

    def present(self, root: Path) -> list[Path]:
        """Return the existing files.

        Args:
            root: root of the machine's files; `/` on the machine itself.
        """
        places = [root / path.lstrip("/") for path in self.files]
        return [place for place in places if place.exists()]

    def remove_files(self, root: Path) -> None:
        """Remove the files that exist.

        Raises:
            InstallationError: a file cannot be removed.
        """
        for place in self.present(root):
            try:
                remove_file(place)
            except OSError as error:
                raise InstallationError(f"{place}: cannot be removed: {error.strerror}; uninstall as root") from None


def run_all(commands: Sequence[Sequence[str]], run: RunProgram) -> None:
    """Run commands in order.

    Raises:
        InstallationError: a command failed; earlier ones were run.
    """
    for command in commands:
        result = run(command, "")
        if result.code != 0:
            raise InstallationError(f"{' '.join(command)}: {result.output.strip() or f'exit status {result.code}'}")


@dataclass(frozen=True)
class CodeProblem:
    """The reason why the service cannot or must not run the installed code.

    Attributes:
        found: the problem.
        remedy: what to do.
        writable: a part of the code that users other than root can change, if that is the problem, which may be
            allowed.
    """

    found: str
    remedy: str
    writable: Path | None = None


def code_problem(code: InstalledCode, look_at: Stat = os.stat) -> CodeProblem | None:
    """Return why `unit_of` would refuse the installed code, or None. This may take seconds.

    Args:
        code: the installed `wattfleet` and the code that it imports.
        look_at: returns a file's status; tests replace `os.stat`.

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


def unit_of(text: str, code: InstalledCode, look_at: Stat, allow_writable: bool) -> tuple[str, Path | None]:
    """Return a shipped unit, changed to run the installed program.

    Args:
        text: the shipped unit.
        code: the installed `wattfleet` and the code that it imports.
        look_at: returns a file's status; tests replace `os.stat`.
        allow_writable: whether to allow code that users other than root can change, and thereby become the service's
            user.

    Returns:
        The unit, and a part of the code that users other than root can change, if that is allowed.

    Raises:
        InvalidInputError: the service cannot or must not run that program.
    """
    problem = code_problem(code, look_at)
    writable = None if problem is None else problem.writable
    if problem is not None and (writable is None or not allow_writable):
        way_out = "" if writable is None else ", or pass --allow-writable"
        raise InvalidInputError(f"{problem.found}; {problem.remedy}{way_out}")
    return text.replace(_SHIPPED_PROGRAM, str(code.program)), writable


def require_visible(what: str, path: Path) -> None:
    """Check that a service can see a file or folder.

    Raises:
        InvalidInputError: the unit's ProtectHome and PrivateTmp hide it.
    """
    if str(path).startswith(_HIDDEN):
        raise InvalidInputError(
            f"{what} {path}: is in a home or temporary directory, which the service cannot see; move it, for example"
            f" to {SETTINGS_FOLDER}"
        )


def _change(place: Path, content: str) -> str:
    if not place.exists():
        return "write"
    return "keep" if place.read_text(encoding="utf-8") == content else "replace"
