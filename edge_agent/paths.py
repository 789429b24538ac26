"""Default paths of an agent's files."""

from __future__ import annotations

from pathlib import Path

DEFAULT_STATE_DIRECTORY = "/var/lib/wattfleet"

PROFILE_FILE = "profile.jsonl"
"""Below the state directory: the journal of the profile."""

PREDICTOR_DIRECTORY = "predictor"
"""Below the state directory: the device's own fitted predictor."""

REFERENCES_DIRECTORY = "references"
"""Below the state directory: the reference predictors, each in a folder named by its digest."""

OUTBOX_FILE = "outbox.jsonl"
"""Below the state directory: reports that the coordinator has not acknowledged."""

INSTALLATION_FILE = "installation"
"""Below the state directory: a random name, by which the coordinator knows this agent after a restart."""

SESSION_FILE = "session.json"
"""Below the state directory: how the session with the coordinator stands, for `wattfleet agent status`."""

WELCOME_FILE = "welcome.json"
"""Below the state directory: the latest Welcome, for a start while the coordinator is away."""


def device_folder(state_directory: Path) -> Path:
    """The folder for the device's lock and for the backup of its knobs."""
    return state_directory / "device"
