"""Saves, reads and deletes the events of the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from sqlalchemy import Connection, delete, func, select

from coordinator.state.event_records import EventFilter, EventRecord, ExpiredEvents
from coordinator.state.records import StoredRecord
from coordinator.store.statements import Statements
from coordinator.store.tables import EventRow


def save_events(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    """Save events."""
    if found := [asdict(each) for each in records if isinstance(each, EventRecord)]:
        connection.execute(statements.event, found)


def drop_events(connection: Connection, expired: ExpiredEvents) -> None:
    """Delete old events."""
    connection.execute(delete(EventRow).where(EventRow.at < expired.now - expired.keep))
    newest = connection.scalar(select(func.max(EventRow.order))) or 0
    connection.execute(delete(EventRow).where(EventRow.order <= newest - expired.max_events))


def events(connection: Connection, wanted: EventFilter) -> list[EventRecord]:
    """The newest events that a filter keeps, newest first."""
    query = select(EventRow.__table__).order_by(EventRow.at.desc(), EventRow.order.desc()).limit(wanted.limit)
    if wanted.kinds:
        query = query.where(EventRow.kind.in_(wanted.kinds))
    if wanted.device_id:
        query = query.where(EventRow.device_id == wanted.device_id)
    if wanted.run_id:
        query = query.where(EventRow.run_id == wanted.run_id)
    if wanted.supplies is not None:
        query = query.where(EventRow.supply.in_(wanted.supplies))
    if wanted.since is not None:
        query = query.where(EventRow.at >= wanted.since)
    names = [each.name for each in fields(EventRecord)]
    return [EventRecord(**{name: getattr(row, name) for name in names}) for row in connection.execute(query)]
