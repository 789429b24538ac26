"""`wattfleet agent doctor`: check this machine, and advise on problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, IDENTITY_DIRECTORY
from wattfleet_io.console import print_json, terminal
from wattfleet_proto.local_socket import DEFAULT_SOCKET

if TYPE_CHECKING:
    from edge_agent.diagnosis.finding import Finding

_STYLES = {"ok": "green", "limited": "yellow", "absent": "yellow", "fails": "bold red"}


def doctor(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    socket: Annotated[Path, typer.Option(help="Unix socket where the agent serves Flower's ClientApp.")] = Path(
        DEFAULT_SOCKET
    ),
    identity: Annotated[
        Path | None,
        typer.Option(
            help="Check the key and the certificate in this folder. Default: the folder"
            f" {IDENTITY_DIRECTORY} in the state directory.",
            show_default=False,
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Check everything that the agent needs and suggest fixes, without changing anything.

    The exit code is 1 if something must be fixed. A machine without a power meter exits with 0, but joins no rounds.
    """
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.diagnosis.machine import diagnose
    from wattfleet_io.systemd.ownership import running_code

    folder = folder_of_device(device, state_dir)
    findings = list(
        diagnose(
            device,
            lambda: open_named(device, state_dir),
            state_dir,
            folder,
            socket,
            running_code(),
            identity or state_dir / IDENTITY_DIRECTORY,
        )
    )
    levels = {finding.level for finding in findings}
    if json_:
        works = levels.isdisjoint({"absent", "fails"})
        print_json({"works": works, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_table(findings)
    if "fails" in levels:
        raise typer.Exit(1)


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    from wattfleet_io.tables import FittingTable, columns, texts

    table = FittingTable(columns("topic", "level", texts("found")), has_headings=False)
    for finding in findings:
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n-> {finding.advice}", style="dim")
        table.add(finding.topic, Text(finding.level, style=_STYLES[finding.level]), found)
    console = terminal()
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in _STYLES}
    summary = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    if counts["fails"]:
        verdict, style = "The agent cannot run here", "bold red"
    elif counts["absent"]:
        verdict, style = "The agent can run here, but joins no rounds until the absent parts are added", "bold yellow"
    else:
        verdict, style = "The agent can run here", "bold"
    console.print(f"\n{verdict}: {summary}.", style=style)
