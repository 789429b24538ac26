"""The `wattfleet agent` command group."""

from __future__ import annotations

import typer

from edge_agent.cli.choose import apply, choose, explain, modes, restore
from edge_agent.cli.duty import app as duty
from edge_agent.cli.front import front
from edge_agent.cli.profile import fit, profile
from edge_agent.cli.service import RunCommand, install, join, run, trust_references, uninstall
from edge_agent.cli.status import describe, doctor, selftest, status, watch
from wattfleet.common.identity.invites import InviteCommand

_HELP = "Measure, control and run one device of the fleet."

app = typer.Typer(no_args_is_help=True, add_completion=False, help=_HELP)


@app.callback(help=_HELP)
def group() -> None:
    """Keep the commands in a group."""


_LOOK, _MEASURE, _FLEET = "Look at the device", "Measure and choose modes", "Take part in a fleet"

for looking in (doctor, selftest, modes, status, watch, describe):
    app.command(rich_help_panel=_LOOK)(looking)
for measuring in (profile, fit, front, choose, explain, apply, restore):
    app.command(rich_help_panel=_MEASURE)(measuring)
app.command(cls=InviteCommand, rich_help_panel=_FLEET)(join)
app.command(cls=RunCommand, rich_help_panel=_FLEET)(run)
for joined in (install, uninstall, trust_references):
    app.command(rich_help_panel=_FLEET)(joined)
app.add_typer(duty, name="duty", rich_help_panel=_FLEET)
