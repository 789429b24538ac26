"""Keeps the folder of the device's SuperNode up to date: its certificates and the addresses of SuperLink and agent."""

from __future__ import annotations

import logging

from edge_agent.paths import SUPERNODE_DIRECTORY
from edge_agent.settings import AgentSettings
from wattfleet.errors import WattfleetError
from wattfleet_identity.identity_folder import read_identity
from wattfleet_identity.supernode_folder import update_supernode

_log = logging.getLogger(__name__)


def update_supernode_folder(settings: AgentSettings) -> None:
    """Update the SuperNode's folder, after the agent's start or after a renewal of its certificate.

    If that fails, the failure is logged and the SuperNode continues with the old contents.
    """
    folder = settings.device.state_dir / SUPERNODE_DIRECTORY
    try:
        identity = read_identity(settings.identity_folder)
        if identity is not None:
            update_supernode(folder, identity, str(settings.device.socket.absolute()))
    except (OSError, WattfleetError) as error:
        _log.warning("the folder of Flower's SuperNode, %s, is not up to date: %s", folder, error)
