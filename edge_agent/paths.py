"""Default paths of an agent's files."""

from __future__ import annotations

from pathlib import Path

DEFAULT_STATE_DIRECTORY = "/var/lib/wattfleet"

BACKUP_FILE = "device-before.json"
"""In a device's folder: its settings before the first change, as long as it may be in another mode than its owner's."""

WORKLOADS_DIRECTORY = "workloads"
"""Below the state directory: the workloads, each in its own folder."""

WORKLOAD_FILE = "workload.json"
"""Below a workload's folder: its name and what is known of it."""

PROFILE_FILE = "profile.jsonl"
"""Below a workload's folder: the journal of its profile."""

IDLE_FILE = "idle.json"
"""Below the state directory: the power of the parked device, and the meter that measured it."""

PREDICTOR_DIRECTORY = "predictor"
"""Below a workload's folder: the device's own predictor, fitted to it."""

REFERENCES_DIRECTORY = "references"
"""Below the state directory: the reference predictors, each in a folder named by its digest."""

TRUST_DIRECTORY = "reference-trust"
"""Below the state directory: the root of signed references that the device trusts; absent if none need be signed."""

OUTBOX_FILE = "outbox.jsonl"
"""Below the state directory: reports that the coordinator has not acknowledged."""

INSTALLATION_FILE = "installation"
"""Below the state directory: a random name, by which the coordinator recognizes this agent after a restart."""

IDENTITY_DIRECTORY = "identity"
"""Below the state directory: the agent's key and certificate."""

SUPERNODE_DIRECTORY = "supernode"
"""Below the state directory: the key of the device's SuperNode, which the group `wattfleet` may read."""

SESSION_FILE = "session.json"
"""Below the state directory: the state of the session with the coordinator, for `wattfleet agent status`."""

EXPORTER_FILE = "exporter.json"
"""Below the state directory: the URL of the agent's metrics, while it serves them."""

DUTY_FILE = "duty.json"
"""Below the state directory: the duty in force."""

INFERENCE_DIRECTORY = "inference"
"""Below the state directory: measured rows of inference, in one CSV file per workload."""

SERVED_FILE = "served.jsonl"
"""Below the state directory: what a simulated board has served, span by span."""

WORK_FILE = "work.jsonl"
"""Below the state directory: when a virtual board worked, in which mode, and what it drew, span by span."""

WELCOME_FILE = "welcome.json"
"""Below the state directory: the latest Welcome, for a start while the coordinator is unreachable."""

REVOKED_FILE = "revoked.json"
"""Below the state directory: the revoked certificates of viewers and operators, who may not read the metrics."""


def device_folder(state_directory: Path) -> Path:
    """Return the folder for the device's lock and the backup of its knobs."""
    return state_directory / "device"
