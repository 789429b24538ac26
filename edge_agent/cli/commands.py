"""The `wattfleet agent` command group."""

from __future__ import annotations

import typer

from edge_agent.cli.apply import apply, restore
from edge_agent.cli.choose import choose
from edge_agent.cli.doctor import doctor
from edge_agent.cli.duty import app as duty
from edge_agent.cli.explain import explain
from edge_agent.cli.fit import fit
from edge_agent.cli.front import front
from edge_agent.cli.join import join
from edge_agent.cli.modes import modes
from edge_agent.cli.profile import profile
from edge_agent.cli.service.install import install
from edge_agent.cli.service.run import RunCommand, run
from edge_agent.cli.service.uninstall import uninstall
from edge_agent.cli.status import status
from edge_agent.cli.trust import trust_references
from edge_agent.cli.watch import watch
from wattfleet_identity.invite_input import InviteCommand

_HELP = "Measure, control and run one device of the fleet."

app = typer.Typer(no_args_is_help=True, add_completion=False, help=_HELP)


@app.callback(help=_HELP)
def group() -> None:
    """Keep the commands in a group."""


_LOOK, _MEASURE, _FLEET = "Look at the device", "Measure and choose modes", "Take part in a fleet"

for looking in (doctor, modes, status, watch):
    app.command(rich_help_panel=_LOOK)(looking)
for measuring in (profile, fit, front, choose, explain, apply, restore):
    app.command(rich_help_panel=_MEASURE)(measuring)
app.command(cls=InviteCommand, rich_help_panel=_FLEET)(join)
app.command(cls=RunCommand, rich_help_panel=_FLEET)(run)
for joined in (install, uninstall, trust_references):
    app.command(rich_help_panel=_FLEET)(joined)
app.add_typer(duty, name="duty", rich_help_panel=_FLEET)
