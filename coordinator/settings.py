"""Settings of the coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from wattfleet.common.settings.model import Group, LogSettings, Names, Settings, setting
from wattfleet.core.planning.policies import POLICIES
from wattfleet_proto.limits import LEASE_S, MAX_SHARED_MODES, PROFILE_MODES

# --- Watts ------------------------------------------------------------------------------------------------------------
# Settings of the site's power budgets, and of how long grants last.


class SiteSettings(Group):
    """Site: its power budgets."""

    budget_w: float | None = setting(
        None,
        "Limit the power of all devices together to this many watts.",
        unit="W",
        option="--site-budget-w",
        unset="none; pass this or --site-file",
    )
    file: Path | None = setting(
        None,
        "Read supplies, their budgets and the devices behind them from this file (docs/budgets.md).",
        option="--site-file",
        unset="none; pass this or --site-budget-w",
    )
    query_timeout_s: float = setting(5.0, "Time for one query of Prometheus to be answered.", unit="s", gt=0)


class GrantSettings(Group):
    """Grants: how long a device may draw more than its idle power without contact to the coordinator."""

    lifetime_s: float = setting(
        120.0,
        "Time for which a device may continue training after it lost the coordinator; then it parks. Its watts stay"
        " reserved until then. With a longer time, trainings survive longer outages, but a lower budget holds later"
        " (docs/reliability.md).",
        unit="s",
        ge=10,
        le=86_400,
    )
    confirm_timeout_s: float = setting(
        10.0,
        "Time for a connected device to confirm a new power limit. If it does not, other devices are trimmed instead.",
        unit="s",
        gt=0,
    )
    stop_margin_s: float = setting(
        5.0,
        "Time for a device to park after its grant has lapsed. Its watts stay reserved until then.",
        unit="s",
        ge=0,
    )
    longest_unknown_s: float = setting(
        21_600.0,
        "Do not end a training before this time if its device does not know yet how many minibatches its epoch has.",
        unit="s",
        gt=0,
        le=2_592_000,
    )


# --- Selection --------------------------------------------------------------------------------------------------------
# Settings of client selection, and of the devices' profiling.


class PolicySettings(Group):
    """Client selection: the policy and its parameters (docs/planning.md)."""

    name: str = setting(
        "progress",
        f"Client-selection policy: {', '.join(POLICIES)}, or one of an installed package (docs/planning.md).",
        option="--policy",
    )
    clients: int | None = setting(
        None,
        "Devices to select per round, for policies that take a number.",
        option="--clients",
        unset="half of the devices; with progress: as many as are useful",
    )
    seed: int = setting(0, "Seed of the policies that select at random.", option="--seed", ge=0)
    deadline_s: float | None = setting(
        None,
        "Limit a round's training to this many seconds; the policy deadline needs it.",
        unit="s",
        option="--deadline-s",
        unset="none",
    )
    utility: Literal["equal", "loss"] | None = setting(
        None,
        "Maximize the number of devices (equal) or the sum of their losses (loss), for the policy deadline.",
        unset="equal",
    )
    tiers: int | None = setting(None, "Sort devices into this many tiers, for the policy tiers.", unset="5")
    floor: float | None = setting(
        None,
        "Select every device in at least this share of the rounds, for the policy fair.",
        unset="half of an even share",
    )
    half_devices: float | None = setting(
        None,
        "Number of devices of a large fleet with which a round makes half of the possible progress, for the policy"
        " progress. Lower it if the devices' data are alike.",
        unset="3",
    )
    overhead_s: float | None = setting(
        None,
        "Time per round in addition to training, in seconds, for the policy progress.",
        unit="s",
        unset="10",
    )


class SelectionSettings(Group):
    """Devices to select from: limits that hold for every policy."""

    include: Names = setting(
        (),
        "Select only these devices: id:NAME, tag:NAME or site:NAME. Repeatable.",
        option="--include",
        unset="all devices",
    )
    exclude: Names = setting(
        (), "Never select these devices: id:NAME, tag:NAME or site:NAME. Repeatable.", option="--exclude"
    )
    over_selection: float = setting(
        0.0,
        "Select this share of devices in addition to the policy's number, 0 to 10; 0.2 adds a fifth.",
    )


class ProfilingSettings(Group):
    """Profiling: what each device measures, and the reference predictor it transfers from."""

    reference: str = setting(
        "agx_orin_resnet18",
        "Reference predictor: the name of one that ships with Wattfleet, or a directory.",
        option="--reference",
    )
    reference_metadata: Path | None = setting(
        None,
        "Serve references that the operator has signed: keep their metadata, and the coordinator's own key, in this"
        " directory (docs/references.md).",
        option="--reference-metadata",
        unset="references are not signed",
    )
    modes: int = setting(
        50,
        "Measure at most this many power modes on each device.",
        option="--profile-modes",
        ge=PROFILE_MODES[0],
        le=PROFILE_MODES[1],
    )


# --- Peers ------------------------------------------------------------------------------------------------------------
# Settings of what agents and apps may do: sessions, reports, requests and rounds.


class SessionSettings(Group):
    """Sessions: leases, reconnections and reports of the agents."""

    lease_s: float = setting(
        5.0,
        "Longest time between two messages of an agent in a small fleet.",
        unit="s",
        ge=LEASE_S[0],
        le=LEASE_S[1],
    )
    renewals_per_s: float = setting(
        250.0,
        "Number of lease renewals per second above which leases get longer. Agents renew early, so the actual number"
        " is up to 1.5 times as high.",
        unit="1/s",
        gt=0,
    )
    return_grace_s: float = setting(
        60.0, "Time to wait after a restart for devices that were connected before.", unit="s", ge=0
    )
    check_s: float = setting(1.0, "Time between two checks for devices that have gone silent.", unit="s", gt=0)
    max_new_devices_per_connection: int = setting(
        100,
        "Limit on devices that one connection may enrol for the first time. Every agent has its own connection.",
        ge=1,
    )
    max_new_devices_per_host: int = setting(
        20_000,
        "Limit on devices that one host may enrol for the first time since the start; a fleet behind one address is one"
        " host.",
        ge=1,
    )
    max_workloads: int = setting(
        32,
        "Limit on the workloads per device whose predictions are kept. Beyond it, the one reported longest ago is "
        "dropped.",
        ge=1,
        le=1000,
    )
    share_modes: int = setting(
        MAX_SHARED_MODES,
        "Number of measured modes of each workload that devices of one kind learn from each other. 0 switches it off.",
        ge=0,
        le=MAX_SHARED_MODES,
    )


class ClaimSettings(Group):
    """Claims: what devices may report, and when their predictions are no longer trusted (docs/coordinator.md)."""

    other_board_w: float = setting(
        1000.0,
        "Largest plausible power of a training on a kind of board that Wattfleet does not know.",
        unit="W",
        gt=0,
    )
    other_board_idle_w: float = setting(
        20.0,
        "Largest plausible idle power of a kind of board that Wattfleet does not know. Set it below the site's budget:"
        " a device may claim as much.",
        unit="W",
        gt=0,
    )
    max_contradictions: int = setting(
        3,
        "Leave a device out once this many of its last 8 observed rounds contradict its predictions. 9 never does so.",
        ge=1,
        le=9,
    )


class PeerSettings(Group):
    """Peers: limits on the requests of one agent, app or client."""

    calls_per_connection: int = setting(
        100, "Limit on the calls in progress over one connection; an agent has two at most.", ge=1
    )
    calls_per_host: int = setting(
        20_000, "Limit on the calls in progress from one host; a fleet behind one address is one host.", ge=1
    )
    requests_per_s: float = setting(
        500.0, "Limit on the requests of apps and commands from one host; more are refused.", unit="1/s", gt=0
    )
    messages_per_s: float = setting(
        100.0, "Limit on the messages in one agent's session; more are read later.", unit="1/s", gt=0
    )
    messages_at_once: int = setting(
        2000,
        "Messages in one agent's session that are read at once. An agent's outbox keeps 1,000 observations.",
        ge=1,
    )


class RoundSettings(Group):
    """Rounds: when one that Flower's server never finished is abandoned."""

    overdue_s: float = setting(
        600.0,
        "Abandon a round this long after twice its planned duration or its deadline.",
        unit="s",
        ge=0,
    )
    max_live_runs: int = setting(256, "Limit on the runs that have not ended; further ones are refused.", ge=1)
    fronts_wait_s: float = setting(
        5.0,
        "Time for which the plan of a run that has just started waits for the devices' predictions of its workload.",
        unit="s",
        ge=0,
        le=20,
    )
    weights: Names = setting(
        (),
        "Weight of runs that wait for each other's devices or watts: WORKLOAD=WEIGHT. Repeatable in a file.",
        unset="1 for every workload",
    )


# --- Store ------------------------------------------------------------------------------------------------------------
# Settings of the database, and of what is kept in it.


class StoreSettings(Group):
    """Store: the database that the coordinator restarts from."""

    location: str = setting(
        "wattfleet-coordinator.db",
        "Keep the state in this database: an SQLite file, created if absent, or a URL (docs/coordinator.md).",
        option="--store",
    )
    standby: bool = setting(False, "Wait while another coordinator uses the store, then take over.", option="--standby")
    keep_days: float | None = setting(
        None,
        "Delete runs this many days after their end.",
        unit="days",
        option="--keep-days",
        unset="never delete runs",
        gt=0,
        le=1_000_000,
    )
    max_absence_days: float = setting(
        7.0,
        "Distrust the date if, after a restart of the machine, it is later than the newest record by more than this."
        " History is then kept, and overrides may only lower budgets.",
        unit="days",
        gt=0,
        le=1_000_000,
    )
    check_rows: bool = setting(
        True,
        "Check every row of an SQLite file at the start, which takes about half a second for each 100,000 observations."
        " Otherwise only its structure is checked.",
    )


# --- Addresses --------------------------------------------------------------------------------------------------------
# Settings of the coordinator's addresses and identity, and of the SuperLink's address.


class ServerSettings(Group):
    """Addresses: where the coordinator listens, and how it stops."""

    address: str = setting(
        "127.0.0.1:7070", "Serve gRPC on this host:port; port 0 picks a free port.", option="--address"
    )
    http_address: str = setting(
        "127.0.0.1:9464",
        "Serve the web page and Prometheus' /metrics on this host:port; port 0 picks a free port. From other machines,"
        " both need a certificate.",
        option="--http-address",
    )
    max_http_connections: int = setting(
        128,
        "Limit on open connections to the page and /metrics; half of them for one host. A further one closes one that"
        " has sent no request. With a low limit on open files, an eighth of that counts instead.",
        ge=2,
    )
    http_timeout_s: float = setting(
        10.0,
        "Close a connection to the page or to /metrics if the other side takes longer for the TLS handshake, for a "
        "request, or to accept what is sent to it.",
        unit="s",
        gt=0,
    )
    metrics_devices: Names = setting(
        (),
        "Export metrics of individual devices only for these: id:NAME, tag:NAME or site:NAME. id:none exports none."
        " Metrics of the whole fleet count every device.",
        unset="all devices",
    )
    idle_connection_s: float = setting(
        300.0,
        "Close a gRPC connection without a request for this long; an agent's session is one request.",
        unit="s",
        ge=1,
        le=86_400,
    )
    announce: Path | None = setting(
        None, "Write the bound addresses to this file, as JSON.", option="--announce", unset="no file"
    )
    stop_grace_s: float = setting(2.0, "Time for open requests to finish when the coordinator stops.", unit="s", ge=0)
    stop_limit_s: float = setting(
        10.0, "Terminate the process this long after SIGTERM, even if it hangs.", unit="s", gt=0
    )


class IdentitySettings(Group):
    """Identity: the coordinator's certificate, and who may call it (docs/security.md)."""

    directory: Path = setting(
        Path("wattfleet-identity"),
        "Serve with the authority in this directory, which `wattfleet coordinator init` makes. Without it, everything"
        " is plaintext.",
        option="--identity",
    )
    insecure: bool = setting(
        False,
        "Serve plaintext even to other machines: anybody there can read and change everything.",
        option="--insecure",
    )
    enrolment_address: str | None = setting(
        None,
        "Serve machines that have no certificate yet on this host:port.",
        option="--enrolment-address",
        unset="the port after that of --address, or a free one if that is 0",
    )
    operator_address: str | None = setting(
        None,
        "Serve operators and viewers only on this host:port.",
        option="--operator-address",
        unset="on --address, together with all others",
    )
    plaintext_address: str | None = setting(
        None,
        "Also serve agents and Flower apps without certificates on this host:port, while a fleet moves to certificates."
        " A device that has one is refused there.",
        unset="nowhere",
    )
    public_address: str | None = setting(
        None,
        "Tell machines that enrol to connect to this host:port.",
        option="--public-address",
        unset="that of --address",
    )
    certificate_days: float = setting(
        30.0, "Issue certificates for this long; they are renewed after two thirds of it.", unit="days", gt=0, le=3650
    )


class SuperLinkSettings(Group):
    """SuperLink: Flower's server, whose TLS certificate comes from the fleet's authority (docs/flower.md)."""

    address: str | None = setting(
        None,
        "Announce that Flower's SuperLink is at this host:port, and issue a certificate for it.",
        option="--superlink-address",
        unset="unknown; SuperNodes need --superlink",
    )
    hosts: Names = setting(
        (),
        "Further name or IP address of the SuperLink's machine, for its certificate. Repeatable.",
        option="--superlink-host",
        unset="that of --superlink-address, and loopback",
    )


# --- All settings -----------------------------------------------------------------------------------------------------
# All settings of a coordinator, in the groups of its TOML file.


class CoordinatorSettings(Settings):
    """All settings of a coordinator."""

    prefix: ClassVar[str] = "WATTFLEET_COORDINATOR_"

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


# --- Init -------------------------------------------------------------------------------------------------------------
# The coordinator's settings: options of `wattfleet coordinator serve`, environment variables and a TOML file.
#
# `docs/decisions/0009-settings.md` explains which constants are not settings, and why.

__all__ = [
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
