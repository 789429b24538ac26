"""What a coordinator begins with when it opens its store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from coordinator.state.records import DeviceOverrides, DeviceRecord, PublishedReference, RoundRecord, RunRecord
from coordinator.store import rounds, rows
from coordinator.store.tables import (
    BudgetOverride,
    Device,
    DeviceFront,
    DeviceSay,
    Node,
    Reference,
    ReferencePin,
    Run,
)
from wattfleet.budgets import Override


@dataclass(frozen=True)
class KeptRecords:
    """What a store holds, but for the rounds that nobody goes on with.

    Attributes:
        devices: in no particular order.
        nodes: Flower node id -> device id.
        runs: oldest first.
        rounds: those that a coordinator goes on with (see `coordinator.store.rounds.current`); oldest first.
        says: what the operator said of devices.
        overrides: watts that the operator has set, by supply; some may be over.
        references: published reference predictors.
        pinned: digest of the one that is pinned; None for none.
    """

    devices: Sequence[DeviceRecord]
    nodes: dict[int, str]
    runs: Sequence[RunRecord]
    rounds: Sequence[RoundRecord]
    says: Sequence[DeviceOverrides]
    overrides: Mapping[str, Override]
    references: Sequence[PublishedReference]
    pinned: str | None

    @property
    def archived(self) -> frozenset[str]:
        """The runs of which rounds may be left out."""
        return frozenset(record.run_id for record in self.runs)


def load(connection: Connection) -> KeptRecords:
    """All of it, from a database."""
    points = {row.device_id: row.points for row in connection.execute(select(DeviceFront.__table__))}
    fronts = {device_id: rows.front_from_bytes(each) for device_id, each in points.items()}
    devices = connection.execute(select(Device.__table__)).all()
    return KeptRecords(
        devices=[rows.device_record(row, fronts.get(row.device_id)) for row in devices],
        nodes={int(row.node_id): row.device_id for row in connection.execute(select(Node.__table__))},
        runs=[rows.run_record(row) for row in connection.execute(select(Run.__table__).order_by(Run.order))],
        rounds=rounds.current(connection),
        says=[rows.say_record(row) for row in connection.execute(select(DeviceSay.__table__))],
        overrides={
            row.supply: Override(row.watts, row.until) for row in connection.execute(select(BudgetOverride.__table__))
        },
        references=[
            PublishedReference(row.digest, row.manifest, row.weights)
            for row in connection.execute(select(Reference.__table__))
        ],
        pinned=connection.scalar(select(ReferencePin.digest)),
    )
