"""Loads what a coordinator needs when it starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from coordinator.state.identity_records import CertificateRecord, InviteRecord
from coordinator.state.records import DeviceOverrides, DeviceRecord, PublishedReference, RoundRecord, RunRecord
from coordinator.state.stored_grants import GivenUpTraining, StoredGrants
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store import identity_rows, rounds, rows
from coordinator.store.tables import (
    BudgetOverride,
    Device,
    DeviceFront,
    DeviceOverridesRow,
    GivenUpTrainingRow,
    GrantLifetimeRow,
    Node,
    Reference,
    ReferencePin,
    Run,
)
from wattfleet.budgets import Override
from wattfleet.errors import ImplausibleError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredState:
    """What a store holds, except the rounds that are not needed to continue.

    Attributes:
        devices: in no particular order.
        nodes: Flower node id -> device id, in the order in which the nodes were bound.
        pairing_problems: Flower node id -> why it cannot train on its device, or an empty text; only checked nodes.
        runs: oldest first.
        rounds: those that a coordinator continues with (see `coordinator.store.rounds.current`), oldest first.
        overrides: what the operator set for individual devices.
        budget_overrides: budgets that the operator set, by supply; some may have expired.
        references: published reference predictors.
        pinned: digests of the pinned ones.
        unplanned: run id and number of each round without a plan.
        grants: what is known about the grants of an earlier coordinator.
        invites: permissions to enrol; some may have expired.
        certificates: certificates that the fleet's authority has issued; some may have expired.
        is_clock_doubtful: the date is implausible, so overrides may have ended long ago.
    """

    devices: Sequence[DeviceRecord]
    nodes: dict[int, str]
    pairing_problems: dict[int, str]
    runs: Sequence[RunRecord]
    rounds: Sequence[RoundRecord]
    overrides: Sequence[DeviceOverrides]
    budget_overrides: Mapping[str, Override]
    references: Sequence[PublishedReference]
    pinned: Sequence[str]
    unplanned: Sequence[tuple[str, int]]
    grants: StoredGrants
    invites: Sequence[InviteRecord]
    certificates: Sequence[CertificateRecord]
    is_clock_doubtful: bool

    @property
    def archived(self) -> frozenset[str]:
        """The ids of runs with rounds that may not be loaded."""
        return frozenset(record.run_id for record in self.runs)


def load(connection: Connection, is_clock_doubtful: bool) -> StoredState:
    """Load the state from a database.

    Args:
        connection: in a transaction.
        is_clock_doubtful: the date is implausible.
    """
    fronts: dict[str, list[WorkloadFront]] = {}
    # A front without a time was reported to an earlier version. SQLite sorts it first by default, PostgreSQL last.
    by_time = DeviceFront.reported_at.asc().nulls_first()
    for row in connection.execute(select(DeviceFront.__table__).order_by(by_time, DeviceFront.workload)):
        if (known := _front(row)) is not None:
            fronts.setdefault(row.device_id, []).append(known)
    devices = connection.execute(select(Device.__table__)).all()
    nodes = connection.execute(select(Node.__table__).order_by(Node.bound_at.asc().nulls_first())).all()
    return StoredState(
        devices=[rows.device_record(row, fronts.get(row.device_id, ())) for row in devices],
        nodes={int(row.node_id): row.device_id for row in nodes},
        pairing_problems={int(row.node_id): row.pairing_problem for row in nodes if row.pairing_problem is not None},
        runs=[rows.run_record(row) for row in connection.execute(select(Run.__table__).order_by(Run.order))],
        rounds=rounds.current(connection),
        overrides=[
            rows.device_overrides_record(row) for row in connection.execute(select(DeviceOverridesRow.__table__))
        ],
        budget_overrides={
            row.supply: Override(row.watts, row.until) for row in connection.execute(select(BudgetOverride.__table__))
        },
        references=[
            PublishedReference(row.digest, row.manifest, row.weights)
            for row in connection.execute(select(Reference.__table__))
        ],
        pinned=connection.scalars(select(ReferencePin.digest).order_by(ReferencePin.rank)).all(),
        unplanned=rounds.unplanned(connection),
        grants=StoredGrants(
            connection.scalar(select(GrantLifetimeRow.lifetime_s)) or 0.0,
            {
                row.device_id: GivenUpTraining(row.device_id, row.plan_id, row.limit_w)
                for row in connection.execute(select(GivenUpTrainingRow.__table__))
            },
        ),
        invites=identity_rows.invites(connection),
        certificates=identity_rows.certificates(connection),
        is_clock_doubtful=is_clock_doubtful,
    )


def _front(row: Row[Any]) -> WorkloadFront | None:
    """Convert a stored front; None if an earlier version has stored an implausible one."""
    try:
        return rows.workload_front(row)
    except ImplausibleError as error:
        _log.warning("a stored front of %s is not used until the device reports another: %s", row.device_id, error)
        return None
