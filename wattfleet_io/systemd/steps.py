"""Shows the planned steps to install or remove a service, asks for confirmation, and carries them out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattfleet_io.console import print_json, terminal

if TYPE_CHECKING:
    from wattfleet_io.systemd.installation import InstallationPlan, RemovalPlan

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


def show_installation(plan: InstallationPlan, root: Path, json_: bool, whole: bool = False) -> None:
    """Print every file with its change, and every command.

    Args:
        plan: the planned installation.
        root: root of the machine's files; `/` on the machine itself.
        json_: print JSON, with all contents.
        whole: print the unit's content in addition to that of settings.
    """
    texts = {path: plan.shown.get(path, content) for path, content in plan.files.items()}
    if json_:
        files = [{"path": path, "change": change, "content": texts[path]} for path, change in plan.changes(root)]
        print_json({"files": files, "commands": [list(command) for command in plan.commands]})
    else:
        console = terminal()
        for path, change in plan.changes(root):
            console.print(f"{change} {root / path.lstrip('/')}", style="bold", soft_wrap=True)
            if whole or not path.endswith(".service"):
                indented = "".join(f"    {line}\n" for line in texts[path].splitlines())
                console.print(indented, end="", soft_wrap=True, markup=False, highlight=False)
        for command in plan.commands:
            console.print(f"run {' '.join(command)}", style="bold", soft_wrap=True)
        if not whole:
            console.print("show the whole unit file with --json", style="dim")
    if plan.writable is not None:
        typer.echo(
            f"warning: users other than root can write {plan.writable}, and so become the service's user", err=True
        )


def install(plan: InstallationPlan, root: Path, yes: bool, done: str) -> None:
    """Ask for confirmation, write the files, and run the commands if this is the machine itself.

    Args:
        plan: the planned installation, already shown.
        root: root of the machine's files; `/` on the machine itself.
        yes: do not ask.
        done: the message at the end.

    Raises:
        InstallationError: a step failed; earlier steps are done.
    """
    from wattfleet_io.programs import run_program

    if not yes:
        typer.confirm("Proceed?", abort=True, err=True)
    plan.write_files(root)
    if root == THIS_MACHINE:
        plan.run_commands(run_program)
        typer.echo(done, err=True)
    else:
        typer.echo(f"files written below {root}; run the commands on the machine itself", err=True)


def remove(plan: RemovalPlan, root: Path, dry_run: bool, yes: bool, json_: bool, kept: str) -> None:
    """Show the steps of a removal, ask for confirmation, and carry them out.

    Args:
        plan: the planned removal.
        root: root of the machine's files; `/` on the machine itself.
        dry_run: only show the steps.
        yes: do not ask.
        json_: print JSON.
        kept: describes what is not removed.

    Raises:
        InstallationError: a step failed; earlier steps are done.
    """
    from wattfleet_io.programs import run_program
    from wattfleet_io.systemd.installation import run_all

    there = plan.present(root)
    if json_:
        commands: list[Any] = [list(command) for command in (*plan.before, *plan.after)]
        print_json({"files": [str(place) for place in there], "commands": commands})
    elif not there:
        print(f"nothing to remove: no service is installed below {root}")
    else:
        for command in plan.before:
            print(f"run {' '.join(command)}")
        for place in there:
            print(f"remove {place}")
        for command in plan.after:
            print(f"run {' '.join(command)}")
        print(f"keep {kept}")
    if dry_run or not there:
        return
    if not yes:
        typer.confirm("Proceed?", abort=True, err=True)
    if root == THIS_MACHINE:
        run_all(plan.before, run_program)
    plan.remove_files(root)
    if root == THIS_MACHINE:
        run_all(plan.after, run_program)
    typer.echo("removed", err=True)
