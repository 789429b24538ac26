"""Installs a program as a systemd service, and checks who can change the code that it runs."""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from wattfleet.common.atomic_files import remove_file, replace_file
from wattfleet.common.console import print_json, terminal
from wattfleet.common.programs import run_program
from wattfleet.core.errors import InvalidInputError, WattfleetError

UNIT_FOLDER = "/etc/systemd/system"
SETTINGS_FOLDER = "/etc/wattfleet"

_SHIPPED_PROGRAM = "/opt/wattfleet/bin/wattfleet"
_INSTALL_AS_ROOT = f"install Wattfleet as root into a virtual environment such as {Path(_SHIPPED_PROGRAM).parents[1]}"
# Hidden from the service by the unit's ProtectHome and PrivateTmp.
_HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")

# --- Ownership --------------------------------------------------------------------------------------------------------
# Checks who can change the code that the service runs: program, interpreter and imports.


Stat = Callable[[Path], os.stat_result]
"""Returns owner and permissions of a path, following links."""


@dataclass(frozen=True)
class InstalledCode:
    """The code that the service runs.

    Attributes:
        program: the `wattfleet` of an environment.
        interpreter: the Python that runs it, and the `pyvenv.cfg` of its environment, if any.
        imported: folders and archives from which this Python imports.
    """

    program: Path
    interpreter: Sequence[Path] = ()
    imported: Sequence[Path] = ()

    def writable_by_others(self, look_at: Stat = os.stat) -> Path | None:
        """Return the first part that users other than root can change or replace; None if there is none.

        This checks all parent folders, every file in the folders of imports, and the targets of all links on the way.
        It may take seconds.

        Args:
            look_at: `os.stat` except in tests.

        Raises:
            InvalidInputError: a part cannot be read.
        """
        try:
            for place in self._places():
                try:
                    found = look_at(place)
                except (FileNotFoundError, NotADirectoryError):
                    # An optional archive or a broken link: creating it requires access to its folder, which is checked.
                    continue
                if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return place
        except OSError as error:
            raise InvalidInputError(
                f"{error.filename} cannot be read ({error.strerror}); run this as root, or repair it"
            ) from None
        return None

    def _places(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for path in (self.program, *self.interpreter, *self.imported):
            yield from _on_the_way_to(path, seen)
        walked: set[Path] = set()
        for folder in self.imported:
            yield from _below(folder, seen, walked)


def running_code() -> InstalledCode:
    """Return the code of the environment that runs this process."""
    program = Path(sysconfig.get_path("scripts"), "wattfleet")
    # Python also searches the program's folder, which does not contain modules.
    imported = [Path(place) for place in sys.path if place and Path(place) != program.parent]
    return InstalledCode(program, (Path(sys.executable), Path(sys.prefix, "pyvenv.cfg")), imported)


def _on_the_way_to(path: Path, seen: set[Path]) -> Iterator[Path]:
    for place in (path, *path.parents):
        if place in seen:
            continue
        seen.add(place)
        yield place
        if place.is_symlink():
            yield from _on_the_way_to(place.parent / place.readlink(), seen)


def _below(folder: Path, seen: set[Path], walked: set[Path]) -> Iterator[Path]:
    where = folder.resolve()
    if where in walked or not where.is_dir():
        return
    walked.add(where)
    with os.scandir(where) as listed:
        entries = list(listed)
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            yield from _on_the_way_to(path, seen)
        else:
            yield path
        if entry.is_dir():
            yield from _below(path, seen, walked)


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


# --- Steps ------------------------------------------------------------------------------------------------------------
# Shows the planned steps to install or remove a service, asks for confirmation, and carries them out.

THIS_MACHINE = Path("/")

DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", allow_from_autoenv=False, help="Show the planned steps without doing them."),
]
YesOption = Annotated[bool, typer.Option("--yes", allow_from_autoenv=False, help="Skip the confirmation prompt.")]
ImageToWriteOption = Annotated[
    Path,
    typer.Option(
        "--root",
        allow_from_autoenv=False,
        help="Write the files below this folder and run no commands, to prepare a disk image.",
    ),
]
ImageToCleanOption = Annotated[
    Path,
    typer.Option(
        "--root",
        allow_from_autoenv=False,
        help="Remove the files below this folder and run no commands, to clean a disk image.",
    ),
]
AllowWritableOption = Annotated[
    bool,
    typer.Option(
        "--allow-writable",
        allow_from_autoenv=False,
        help="Install even if users other than root can modify the service's code, and thereby become its user.",
    ),
]


class InstallationError(WattfleetError):
    """A step of the installation failed; earlier steps are done."""


@dataclass(frozen=True)
class Installation:
    """A planned installation.

    Attributes:
        unit: the name of the unit file, by which systemd knows the service.
        files: the content of each file, by path on the machine.
        commands: commands to run after the files are written, before the service is started.
        writable: a part of the service's code that users other than root can change, if that was allowed.
        shown: text to print instead of a file's content, by path, for people and as JSON.
        modes: permissions of files that are not readable for everybody, by path.
    """

    unit: str
    files: Mapping[str, str]
    commands: Sequence[Sequence[str]]
    writable: Path | None = None
    shown: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)


def install(
    plan: Installation,
    root: Path,
    dry_run: bool,
    yes: bool,
    json_: bool,
    whole: bool = False,
    warning: str | None = None,
) -> None:
    """Show every file with its change and every command, ask for confirmation, and carry them out.

    Args:
        plan: the planned installation.
        root: root of the machine's files; `/` on the machine itself, and only there commands run.
        dry_run: only show the steps.
        yes: do not ask.
        json_: print JSON, with all contents.
        whole: print the unit's content in addition to that of settings.
        warning: printed after the steps.

    Raises:
        InstallationError: a step failed; earlier steps are done.
    """
    places = {path: root / path.lstrip("/") for path in plan.files}
    texts = {path: plan.shown.get(path, content) for path, content in plan.files.items()}
    changes = {path: _change(place, plan.files[path]) for path, place in places.items()}
    start = [["systemctl", "daemon-reload"], ["systemctl", "enable", plan.unit], ["systemctl", "restart", plan.unit]]
    commands = [*map(list, plan.commands), *start]
    if json_:
        files = [{"path": path, "change": changes[path], "content": text} for path, text in texts.items()]
        print_json({"files": files, "commands": commands})
    else:
        console = terminal()
        for path, place in places.items():
            console.print(f"{changes[path]} {place}", style="bold", soft_wrap=True)
            if whole or not path.endswith(".service"):
                indented = "".join(f"    {line}\n" for line in texts[path].splitlines())
                console.print(indented, end="", soft_wrap=True, markup=False, highlight=False)
        for command in commands:
            console.print(f"run {' '.join(command)}", style="bold", soft_wrap=True)
        if not whole:
            console.print("show the whole unit file with --json", style="dim")
    if plan.writable is not None:
        typer.echo(
            f"warning: users other than root can write {plan.writable}, and so become the service's user", err=True
        )
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        return
    if not yes:
        typer.confirm("Proceed?", abort=True, err=True)
    for path, place in places.items():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_file(place, plan.files[path].encode(), mode=plan.modes.get(path, 0o644))
        except OSError as error:
            raise InstallationError(f"{place}: cannot be written: {error.strerror}; install as root") from None
    if root == THIS_MACHINE:
        _run(*commands)
        typer.echo(f"installed; check it with: systemctl status {plan.unit.removesuffix('.service')}", err=True)
    else:
        typer.echo(f"files written below {root}; run the commands on the machine itself", err=True)


def uninstall(unit: str, files: Sequence[str], kept: str, root: Path, dry_run: bool, yes: bool, json_: bool) -> None:
    """Show the steps of a removal, ask for confirmation, and carry them out.

    Args:
        unit: the name of the unit file. Stopping the service restores the device.
        files: the files to remove, by path on the machine.
        kept: describes what is not removed.
        root: root of the machine's files; `/` on the machine itself, and only there commands run.
        dry_run: only show the steps.
        yes: do not ask.
        json_: print JSON.

    Raises:
        InstallationError: a step failed; earlier steps are done.
    """
    stop, forget = ["systemctl", "disable", "--now", unit], ["systemctl", "daemon-reload"]
    there = [place for path in files if (place := root / path.lstrip("/")).exists()]
    if json_:
        print_json({"files": [str(place) for place in there], "commands": [stop, forget]})
    elif not there:
        print(f"nothing to remove: no service is installed below {root}")
    else:
        print(f"run {' '.join(stop)}", *(f"remove {place}" for place in there), sep="\n")
        print(f"run {' '.join(forget)}", f"keep {kept}", sep="\n")
    if dry_run or not there:
        return
    if not yes:
        typer.confirm("Proceed?", abort=True, err=True)
    if root == THIS_MACHINE:
        _run(stop)
    for place in there:
        try:
            remove_file(place)
        except OSError as error:
            raise InstallationError(f"{place}: cannot be removed: {error.strerror}; uninstall as root") from None
    if root == THIS_MACHINE:
        _run(forget)
    typer.echo("removed", err=True)


def _change(place: Path, content: str) -> str:
    if not place.exists():
        return "write"
    return "keep" if place.read_text(encoding="utf-8") == content else "replace"


def _run(*commands: Sequence[str]) -> None:
    for command in commands:
        result = run_program(command, "")
        if result.code != 0:
            raise InstallationError(f"{' '.join(command)}: {result.output.strip() or f'exit status {result.code}'}")
