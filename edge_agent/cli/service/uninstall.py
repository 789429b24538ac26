"""`wattfleet agent uninstall`: remove the systemd service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import JsonOption
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.console import print_json

_THIS_MACHINE = Path("/")


def uninstall(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", allow_from_autoenv=False, help="Show the planned steps without doing them.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", allow_from_autoenv=False, help="Skip the confirmation prompt.")] = False,
    root: Annotated[
        Path,
        typer.Option(
            allow_from_autoenv=False,
            help="Remove the files below this folder and run no commands, to clean a disk image.",
        ),
    ] = _THIS_MACHINE,
    json_: JsonOption = False,
) -> None:
    """Stop the service, which restores the device, and remove its files; keep profile and predictor."""
    from edge_agent.devices.jetson.programs import run_program
    from edge_agent.systemd.installation import removal, run_all

    plan = removal()
    there = plan.present(root)
    commands = [list(command) for command in (*plan.before, *plan.after)]
    if json_:
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
        print(f"keep {DEFAULT_STATE_DIRECTORY} with profile and predictor, and the group")
    if dry_run or not there:
        return
    if not yes:
        typer.confirm("Proceed?", abort=True, err=True)
    if root == _THIS_MACHINE:
        run_all(plan.before, run_program)
    plan.remove_files(root)
    if root == _THIS_MACHINE:
        run_all(plan.after, run_program)
    typer.echo("removed", err=True)
