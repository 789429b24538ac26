"""Settings of what agents and apps may do: sessions, reports, requests and rounds."""

from __future__ import annotations

from wattfleet_io.settings.model import Group, Names, setting
from wattfleet_proto.session_limits import LEASE_S, MAX_SHARED_MODES


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
    missed_leases: int = setting(3, "End a session after this many leases without a message.", ge=1)
    reconnects_per_s: float = setting(
        400.0, "Limit on reconnections per second after a restart; agents spread them.", unit="1/s", gt=0
    )
    return_grace_s: float = setting(
        60.0, "Time to wait after a restart for devices that were connected before.", unit="s", ge=0
    )
    check_s: float = setting(1.0, "Time between two checks for devices that have gone silent.", unit="s", gt=0)
    store_timeout_s: float = setting(
        3.0,
        "Time to wait until a report is stored. After that, the lease is renewed first, and the report is acknowledged"
        " later.",
        unit="s",
        gt=0,
    )
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
    max_unstored_reports: int = setting(
        1500, "Limit on the reports of one session that wait for the store. With more, the session ends.", ge=1
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

    overdue_factor: float = setting(
        2.0, "Abandon a round after this many times its planned duration or deadline, plus overdue_s.", ge=1
    )
    overdue_s: float = setting(600.0, "Additional time after which a round is abandoned.", unit="s", ge=0)
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
