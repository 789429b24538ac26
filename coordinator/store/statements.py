"""Statements that insert or replace rows, in each database's dialect."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Insert, Table, bindparam, case, delete, func
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.store.tables import (
    AuditEntryRow,
    Base,
    BudgetOverride,
    CertificateRow,
    Device,
    DeviceFront,
    DeviceOverridesRow,
    EventRow,
    GivenUpTrainingRow,
    GrantLifetimeRow,
    InviteRow,
    Node,
    Observation,
    Reference,
    Round,
    Run,
    UnplannedRoundRow,
)

_INSERT: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}

# Columns that keep the value of the first insert, and the column that triggers maintain.
_FIRST_STAYS = {"order", "first_seen_at", "started_at", "planned_at", "checksum"}


class Statements:
    """One statement per table that inserts a row or replaces the one with the same key, and some that delete rows."""

    def __init__(self, dialect: str) -> None:
        """Use a database's dialect.

        Args:
            dialect: sqlite or postgresql.
        """
        self._insert = _INSERT[dialect]
        self.device = self._replacing(Device, "device_id")
        self.front = self._replacing(DeviceFront, "device_id", "workload")
        self.no_front = delete(DeviceFront).where(
            DeviceFront.device_id == bindparam("of_device"), DeviceFront.workload == bindparam("gone")
        )
        self.forgotten = [
            delete(table).where(table.device_id == bindparam("gone"))
            for table in (Device, DeviceFront, DeviceOverridesRow, Node)
        ]
        self.node = self._replacing(Node, "node_id")
        self.run = self._replacing(Run, "run_id")
        self.round = self._replacing(Round, "plan_id")
        self.unplanned = self._replacing(UnplannedRoundRow, "run_id", "number")
        self.observation = self._replacing(Observation, "plan_id", "device_id")
        self.device_overrides = self._replacing(DeviceOverridesRow, "device_id")
        self.override = self._replacing(BudgetOverride, "supply")
        self.reference = self._replacing(Reference, "digest")
        self.given_up = self._replacing(GivenUpTrainingRow, "device_id")
        self.not_given_up = delete(GivenUpTrainingRow).where(GivenUpTrainingRow.device_id == bindparam("gone"))
        self.grant_lifetime = self._replacing(GrantLifetimeRow, "only")
        self.invite = self._replacing(InviteRow, "token_hash")
        self.certificate = self._replacing(CertificateRow, "serial")
        self.audit_entry = self._replacing(AuditEntryRow, "entry_id")
        self.event = self._replacing(EventRow, "event_id")

    def _replacing(self, table_class: type[Base], *key: str) -> Insert:
        table: Table = table_class.metadata.tables[table_class.__tablename__]
        statement = self._insert(table)
        replaced = {
            column.name: statement.excluded[column.name]
            for column in table.columns
            if column.name not in _FIRST_STAYS and column.name not in key
        }
        if "finished_at" in replaced:
            ended = statement.excluded.finished_at
            # The time of the run's first end, unless it was started again since.
            replaced["finished_at"] = case((ended.is_(None), None), else_=func.coalesce(table.c.finished_at, ended))
        replacing: Insert = statement.on_conflict_do_update(index_elements=key, set_=replaced)
        return replacing
