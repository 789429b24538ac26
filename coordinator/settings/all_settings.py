"""All settings of a coordinator, in the groups of its TOML file."""

from __future__ import annotations

from coordinator.settings.addresses import IdentitySettings, ServerSettings, SuperLinkSettings
from coordinator.settings.peers import ClaimSettings, PeerSettings, RoundSettings, SessionSettings
from coordinator.settings.selection import PolicySettings, ProfilingSettings, SelectionSettings
from coordinator.settings.store import StoreSettings
from coordinator.settings.watts import GrantSettings, SiteSettings
from wattfleet_io.settings.log import LogSettings
from wattfleet_io.settings.model import Settings


class CoordinatorSettings(Settings):
    """All settings of a coordinator."""

    server: ServerSettings = ServerSettings()
    identity: IdentitySettings = IdentitySettings()
    superlink: SuperLinkSettings = SuperLinkSettings()
    site: SiteSettings = SiteSettings()
    store: StoreSettings = StoreSettings()
    policy: PolicySettings = PolicySettings()
    selection: SelectionSettings = SelectionSettings()
    profiling: ProfilingSettings = ProfilingSettings()
    sessions: SessionSettings = SessionSettings()
    grants: GrantSettings = GrantSettings()
    claims: ClaimSettings = ClaimSettings()
    peers: PeerSettings = PeerSettings()
    rounds: RoundSettings = RoundSettings()
    log: LogSettings = LogSettings()
