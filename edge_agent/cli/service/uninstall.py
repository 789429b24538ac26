"""`wattfleet agent uninstall`: remove the systemd service."""

from __future__ import annotations

from edge_agent.cli.options import JsonOption
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.systemd.steps import THIS_MACHINE, DryRunOption, ImageToCleanOption, YesOption, remove


def uninstall(
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: ImageToCleanOption = THIS_MACHINE,
    json_: JsonOption = False,
) -> None:
    """Stop the service, which restores the device, and remove its files. Profile and predictor are kept."""
    from edge_agent.systemd.installation import removal

    kept = f"{DEFAULT_STATE_DIRECTORY} with profile and predictor, and the group"
    remove(removal(), root, dry_run, yes, json_, kept)
