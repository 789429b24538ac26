"""The coordinator's settings: options of `wattfleet coordinator serve`, environment variables and a TOML file.

`docs/decisions/0009-settings.md` explains which constants are not settings, and why.
"""

from __future__ import annotations

from coordinator.settings.addresses import IdentitySettings, ServerSettings, SuperLinkSettings
from coordinator.settings.all_settings import CoordinatorSettings
from coordinator.settings.peers import ClaimSettings, PeerSettings, RoundSettings, SessionSettings
from coordinator.settings.selection import PolicySettings, ProfilingSettings, SelectionSettings
from coordinator.settings.store import StoreSettings
from coordinator.settings.watts import GrantSettings, SiteSettings

ENVIRONMENT_PREFIX = "WATTFLEET_COORDINATOR_"

__all__ = [
    "ENVIRONMENT_PREFIX",
    "ClaimSettings",
    "CoordinatorSettings",
    "GrantSettings",
    "IdentitySettings",
    "PeerSettings",
    "PolicySettings",
    "ProfilingSettings",
    "RoundSettings",
    "SelectionSettings",
    "ServerSettings",
    "SessionSettings",
    "SiteSettings",
    "StoreSettings",
    "SuperLinkSettings",
]
