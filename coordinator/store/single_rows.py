"""Saves kinds of records that are few and whose rows may be deleted, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert

from coordinator.state.records import PinnedReferences, RemovedReference, StoredRecord, SupplyOverride
from coordinator.state.stored_grants import GivenUpTraining, GrantLifetime
from coordinator.store import rows
from coordinator.store.statements import Statements
from coordinator.store.tables import BudgetOverride, Reference, ReferencePin


def save_single_rows(connection: Connection, statements: Statements, records: Sequence[StoredRecord]) -> None:
    """Save overrides of budgets, the pinned references and records about grants; delete removed references."""
    for record in records:
        if isinstance(record, SupplyOverride):
            if record.override is None:
                connection.execute(delete(BudgetOverride).where(BudgetOverride.supply == record.supply))
            else:
                connection.execute(statements.override, [rows.override_values(record.supply, record.override)])
        elif isinstance(record, PinnedReferences):
            connection.execute(delete(ReferencePin))
            if record.digests:
                ranked = [{"rank": rank, "digest": digest} for rank, digest in enumerate(record.digests, 1)]
                connection.execute(insert(ReferencePin), ranked)
        elif isinstance(record, RemovedReference):
            connection.execute(delete(Reference).where(Reference.digest == record.digest))
        elif isinstance(record, GrantLifetime):
            connection.execute(statements.grant_lifetime, [{"only": 1, "lifetime_s": record.lifetime_s}])
    given_up = [record for record in records if isinstance(record, GivenUpTraining)]
    if found := [vars(each) for each in given_up if each.plan_id]:
        connection.execute(statements.given_up, found)
    if gone := [{"gone": each.device_id} for each in given_up if each.plan_id is None]:
        connection.execute(statements.not_given_up, gone)
