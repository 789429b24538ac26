"""Reads and deletes rounds, a few at a time: one round may have ten thousand devices."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, func, or_, select

from coordinator.state.records import DeviceResult, ObservedTraining, RoundRecord, UnplannedRound, parts_of
from coordinator.store import rows
from coordinator.store.tables import GivenUpTrainingRow, Observation, Round, Run, UnplannedRoundRow
from wattfleet.planning import History

_NEWEST = 3
"""The number of newest rounds that are always loaded, for example for metrics."""

_DELETED_AT_ONCE = 8
"""The number of rounds per transaction: with ten thousand devices each, deleting them takes some tenths of a second."""


def plan_ids_of(connection: Connection, run_id: str) -> list[str]:
    """The ids of a run's rounds, oldest first."""
    return list(connection.scalars(select(Round.plan_id).where(Round.run_id == run_id).order_by(Round.order)))


def round_of(connection: Connection, plan_id: str) -> RoundRecord | None:
    """Load one round with its observations; None if it is not stored."""
    row = connection.execute(select(Round.__table__).where(Round.plan_id == plan_id)).one_or_none()
    if row is None:
        return None
    observed = connection.execute(select(Observation.__table__).where(Observation.plan_id == plan_id))
    return rows.round_record(
        row,
        [ObservedTraining(each.device_id, each.epoch_s, each.power_w, each.beside_duty) for each in observed],
    )


def unplanned(connection: Connection) -> list[tuple[str, int]]:
    """The run id and number of each round without a plan."""
    columns = select(UnplannedRoundRow.run_id, UnplannedRoundRow.number)
    return [(row.run_id, row.number) for row in connection.execute(columns)]


def unplanned_of(connection: Connection, run_id: str, number: int) -> UnplannedRound | None:
    """Load one round without a plan; None if it is not stored."""
    is_it = and_(UnplannedRoundRow.run_id == run_id, UnplannedRoundRow.number == number)
    row = connection.execute(select(UnplannedRoundRow.__table__).where(is_it)).one_or_none()
    return None if row is None else rows.unplanned_record(row)


def history_of(connection: Connection, run_id: str) -> History:
    """Load a run's finished rounds, without their plans."""
    history = History()
    is_over = and_(Round.run_id == run_id, Round.wall_s.is_not(None))
    over = select(Round.number, Round.results).where(is_over).order_by(Round.order)
    for row in connection.execute(over.execution_options(yield_per=1)):
        history = history.after(row.number, parts_of(DeviceResult(**each) for each in row.results))
    return history


def current(connection: Connection) -> list[RoundRecord]:
    """Load the rounds that a coordinator continues with, oldest first.

    They are the newest few, those that may be in flight or were given up, and the newer rounds of their devices.
    """
    may_be_in_flight = and_(Round.wall_s.is_(None), Round.run_id.in_(select(Run.run_id).where(Run.finished.is_(False))))
    is_of_round = GivenUpTrainingRow.plan_id == Round.plan_id
    in_flight: set[str] = set().union(*connection.scalars(select(Round.nodes).where(may_be_in_flight)))
    in_flight.update(connection.scalars(select(GivenUpTrainingRow.device_id).join(Round, is_of_round)))
    newest_first = select(Round.plan_id, Round.nodes).order_by(Round.order.desc())
    wanted: list[str] = []
    with connection.execute(newest_first.execution_options(yield_per=_NEWEST)) as found:
        for row in found:
            if len(wanted) >= _NEWEST and not in_flight:
                break
            if len(wanted) < _NEWEST or not in_flight.isdisjoint(row.nodes):
                wanted.append(row.plan_id)
            in_flight -= row.nodes.keys()
    loaded = (round_of(connection, plan_id) for plan_id in reversed(wanted))
    return [record for record in loaded if record is not None]


def delete_some(connection: Connection, untouched_since: datetime, except_runs: Collection[str]) -> list[str] | None:
    """Delete some rounds of the oldest run that is old enough; with its last round, delete the run.

    Args:
        connection: in a transaction.
        untouched_since: a date and time.
        except_runs: runs to keep.

    Returns:
        The id of the run if it is now deleted completely; None if there was nothing to delete.
    """
    old = (
        select(Run.run_id)
        .where(_is_untouched(untouched_since), Run.run_id.not_in(except_runs))
        .order_by(Run.order)
        .limit(1)
    )
    run_id = connection.scalar(old)
    if run_id is None:
        return None
    return [run_id] if delete_some_of(connection, run_id) else []


def delete_some_of(connection: Connection, run_id: str) -> bool:
    """Delete some rounds of a run; with its last round, delete the run.

    Returns:
        Whether the run is now deleted completely.
    """
    plan_ids = plan_ids_of(connection, run_id)
    deleted = plan_ids[:_DELETED_AT_ONCE]
    connection.execute(delete(Observation).where(Observation.plan_id.in_(deleted)))
    connection.execute(delete(Round).where(Round.plan_id.in_(deleted)))
    if len(deleted) < len(plan_ids):
        return False
    of_run = UnplannedRoundRow.run_id == run_id
    numbers = list(connection.scalars(select(UnplannedRoundRow.number).where(of_run).limit(_DELETED_AT_ONCE)))
    connection.execute(delete(UnplannedRoundRow).where(of_run, UnplannedRoundRow.number.in_(numbers)))
    if len(numbers) == _DELETED_AT_ONCE:  # there may be more
        return False
    connection.execute(delete(Run).where(Run.run_id == run_id))
    return True


def _is_untouched(since: datetime) -> ColumnElement[bool]:
    """A condition for runs that ended before a time, and for unfinished runs whose last round is older than it."""
    of_rounds = select(func.max(func.coalesce(Round.finished_at, Round.planned_at))).where(Round.run_id == Run.run_id)
    touched_at = func.coalesce(of_rounds.correlate(Run).scalar_subquery(), Run.started_at)
    is_unplanned_since = and_(UnplannedRoundRow.run_id == Run.run_id, UnplannedRoundRow.ended_at >= since)
    is_trained_since = exists().where(is_unplanned_since).correlate(Run)
    return or_(Run.finished_at < since, and_(Run.finished.is_(False), touched_at < since, ~is_trained_since))
