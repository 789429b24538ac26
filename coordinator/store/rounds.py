"""Rounds as they are read from the store and removed from it: few at a time, as one may have ten thousand devices."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select

from coordinator.state.records import DeviceResult, ObservedTraining, RoundRecord, parts_of
from coordinator.store import rows
from coordinator.store.tables import Observation, Round, Run
from wattfleet.planning import History

_NEWEST = 3
"""Rounds that are looked at, as by metrics, whoever is waited for."""

_REMOVED_AT_ONCE = 8
"""Rounds in one transaction: of ten thousand devices each, the removal takes some tenths of a second."""


def plan_ids_of(connection: Connection, run_id: str) -> list[str]:
    """The ids of a run's rounds, oldest first."""
    return list(connection.scalars(select(Round.plan_id).where(Round.run_id == run_id).order_by(Round.order)))


def round_of(connection: Connection, plan_id: str) -> RoundRecord | None:
    """One round with what was observed in it; None where there is none."""
    row = connection.execute(select(Round.__table__).where(Round.plan_id == plan_id)).one_or_none()
    if row is None:
        return None
    observed = connection.execute(select(Observation.__table__).where(Observation.plan_id == plan_id))
    return rows.round_record(row, [ObservedTraining(each.device_id, each.epoch_s, each.power_w) for each in observed])


def history_of(connection: Connection, run_id: str) -> History:
    """What a run's rounds come to that are over, without their plans."""
    history = History()
    is_over = and_(Round.run_id == run_id, Round.wall_s.is_not(None))
    over = select(Round.number, Round.results).where(is_over).order_by(Round.order)
    for row in connection.execute(over.execution_options(yield_per=1)):
        history = history.after(row.number, parts_of(DeviceResult(**each) for each in row.results))
    return history


def current(connection: Connection) -> list[RoundRecord]:
    """The rounds that a coordinator goes on with, oldest first.

    They are the newest few, those that runs may be waiting for, and those that their devices were chosen for since.
    """
    may_go_on = and_(Round.wall_s.is_(None), Round.run_id.in_(select(Run.run_id).where(Run.finished.is_(False))))
    waited_for = set().union(*connection.scalars(select(Round.nodes).where(may_go_on)))
    newest_first = select(Round.plan_id, Round.nodes).order_by(Round.order.desc())
    wanted: list[str] = []
    with connection.execute(newest_first.execution_options(yield_per=_NEWEST)) as found:
        for row in found:
            if len(wanted) >= _NEWEST and not waited_for:
                break
            if len(wanted) < _NEWEST or not waited_for.isdisjoint(row.nodes):
                wanted.append(row.plan_id)
            waited_for -= row.nodes.keys()
    kept = (round_of(connection, plan_id) for plan_id in reversed(wanted))
    return [record for record in kept if record is not None]


def forget_some(connection: Connection, untouched_since: datetime, but: Collection[str]) -> list[str] | None:
    """Remove some rounds of the oldest run that has been over, or left alone, for long enough; with the last, the run.

    Args:
        connection: in a transaction.
        untouched_since: a date and time.
        but: runs to leave alone.

    Returns:
        The id of the run if it is gone; None if there was nothing to remove.
    """
    old = select(Run.run_id).where(_is_untouched(untouched_since), Run.run_id.not_in(but)).order_by(Run.order).limit(1)
    run_id = connection.scalar(old)
    if run_id is None:
        return None
    plan_ids = plan_ids_of(connection, run_id)
    removed = plan_ids[:_REMOVED_AT_ONCE]
    connection.execute(delete(Observation).where(Observation.plan_id.in_(removed)))
    connection.execute(delete(Round).where(Round.plan_id.in_(removed)))
    if len(removed) < len(plan_ids):
        return []
    connection.execute(delete(Run).where(Run.run_id == run_id))
    return [run_id]


def _is_untouched(since: datetime) -> ColumnElement[bool]:
    """Runs that ended before, and those that never ended in which nothing was begun or finished any more."""
    of_rounds = select(func.max(func.coalesce(Round.finished_at, Round.planned_at))).where(Round.run_id == Run.run_id)
    touched_at = func.coalesce(of_rounds.correlate(Run).scalar_subquery(), Run.started_at)
    return or_(Run.finished_at < since, and_(Run.finished.is_(False), touched_at < since))
