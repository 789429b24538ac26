"""`wattfleet agent uninstall`: the service taken away again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import JsonOption, print_json
from edge_agent.runtime.paths import DEFAULT_STATE_DIRECTORY

_THIS_MACHINE = Path("/")


def uninstall(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    root: Annotated[
        Path, typer.Option(help="Remove the files below this folder and run nothing, as for an image.")
    ] = _THIS_MACHINE,
    json_: JsonOption = False,
) -> None:
    """Stop the service, which puts the device back, and remove its files; what was measured stays."""
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
        print(f"{DEFAULT_STATE_DIRECTORY} stays, with profile and predictor, and so does the group")
    if dry_run or not there:
        return
    if not yes:
        typer.confirm("Do this?", abort=True, err=True)
    if root == _THIS_MACHINE:
        run_all(plan.before, run_program)
    plan.remove_files(root)
    if root == _THIS_MACHINE:
        run_all(plan.after, run_program)
    typer.echo("removed", err=True)
