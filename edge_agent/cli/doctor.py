"""`wattfleet agent doctor`: what was found, what is missing, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.cli.options import DeviceOption, JsonOption, StateDirOption, open_named, print_json
from edge_agent.runtime.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_proto.local_socket import DEFAULT_SOCKET

if TYPE_CHECKING:
    from edge_agent.diagnosis.finding import Finding

_STYLES = {"ok": "green", "limited": "yellow", "absent": "yellow", "fails": "bold red"}


def doctor(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    socket: Annotated[Path, typer.Option(help="Unix socket for Flower's ClientApp.")] = Path(DEFAULT_SOCKET),
    json_: JsonOption = False,
) -> None:
    """Look at all that the agent needs, and say what to do about what is missing; nothing is changed.

    Ends with 1 if something has to be repaired; a machine that has no power meter is in order, and serves no round.
    """
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.diagnosis.machine import diagnose
    from edge_agent.systemd.ownership import running_code

    folder = folder_of_device(device, state_dir)
    findings = list(diagnose(device, lambda: open_named(device, state_dir), state_dir, folder, socket, running_code()))
    levels = {finding.level for finding in findings}
    if json_:
        works = levels.isdisjoint({"absent", "fails"})
        print_json({"works": works, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_table(findings)
    if "fails" in levels:
        raise typer.Exit(1)


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("topic", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n-> {finding.advice}", style="dim")
        table.add_row(finding.topic, Text(finding.level, style=_STYLES[finding.level]), found)
    console = Console(highlight=False)
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in _STYLES}
    told = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    if counts["fails"]:
        verdict, style = "The agent cannot work here", "bold red"
    elif counts["absent"]:
        verdict, style = "Nothing is out of order, but the agent serves no round without what is absent", "bold yellow"
    else:
        verdict, style = "The agent can work here", "bold"
    console.print(f"\n{verdict}: {told}.", style=style)
