"""Databases of earlier and later versions: upgraded without loss, or refused and left unchanged."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Engine, event, inspect, text

from coordinator.state.records import DeviceResult, ObservedTraining, RunRecord
from coordinator.store import checksums
from coordinator.store.checksums import driver_connection
from coordinator.store.database import database_url, migration_config, open_engine, upgrade
from coordinator.store.store import Store, StoredState
from coordinator.store.tables import Base
from tests.fakes.fronts import columns_of
from tests.fakes.records_to_store import old_runs_deleted
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, ORIN_FRONT, ORIN_NODE, RUN
from tests.fakes.workload_fronts import only_front
from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError

BEFORE_VERSIONS = Path(__file__).with_name("data") / "store_before_versions.sql"
"""Written by the last release before schema versions: two devices that were part of two rounds, and one that is new."""

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
VERSIONS = [each.revision for each in ScriptDirectory.from_config(migration_config()).walk_revisions()]


def now() -> datetime:
    return NOW


@contextmanager
def engine_of(location: Path | URL) -> Iterator[Engine]:
    engine = open_engine(location if isinstance(location, URL) else database_url(location))
    yield engine
    engine.dispose()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "coordinator.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(BEFORE_VERSIONS.read_text())
    return path


def columns(front: Front | None) -> dict[str, list[float]]:
    assert front is not None
    return {name: values.tolist() for name, values in columns_of(front).items()}


def assert_all_is_there(kept: StoredState) -> None:
    """Check everything that `BEFORE_VERSIONS` contains."""
    devices = {record.device_id: record for record in kept.devices}
    assert set(devices) == {"orin", "nano", "new"}
    assert columns(only_front(devices["orin"])) == columns(ORIN_FRONT)
    assert columns(only_front(devices["nano"])) == columns(NANO_FRONT)
    assert (only_front(devices["new"]), devices["new"].idle_w, devices["new"].mode_count) == (None, None, 5_824)
    assert (devices["orin"].idle_w, devices["orin"].detail) == (5.0, "parked")
    assert kept.nodes == {ORIN_NODE: "orin", NANO_NODE: "nano"}
    assert kept.runs == [
        RunRecord(RUN, "FedAvg", 3, {"accuracy": 0.1}),
        RunRecord("4710", "FedAdam", 7, {}, "ValueError: no", True),
    ]
    first, second = kept.rounds
    assert (first.plan_id, first.epochs, first.wall_s) == (f"{RUN}/1", 1.5, 41.5)
    assert first.nodes == second.nodes == {"orin": ORIN_NODE, "nano": NANO_NODE}
    assert first.results == (
        DeviceResult("orin", num_examples=96.0, loss=0.125),
        DeviceResult("nano", "the node is gone", share=0.0),
    )
    assert first.observations == {
        "orin": ObservedTraining("orin", 21.0, 31.0),
        "nano": ObservedTraining("nano", 34.0, 14.5),
    }
    assert first.metrics["accuracy"] == 0.5 and math.isnan(first.metrics["loss"])
    assert [part.device_id for part in second.plan.assignments] == ["nano", "orin"]
    assert (second.plan.planned_w, second.observations, second.results, second.wall_s) == (45.0, {}, (), None)


def test_a_file_from_before_there_were_versions_loses_nothing(old: Path) -> None:
    store = Store(old, now)
    assert_all_is_there(store.load())
    store.close()
    again = Store(old, now)
    assert_all_is_there(again.load())
    again.close()


def test_what_ended_at_an_unknown_time_is_kept_as_long_as_what_ends_now(old: Path) -> None:
    store = Store(old, now)
    store.close()
    later = Store(old, lambda: NOW + timedelta(days=10))
    assert old_runs_deleted(later, timedelta(days=11)) == []
    assert old_runs_deleted(later, timedelta(days=9)) == ["4710"]
    later.close()


def test_a_file_from_before_results_were_kept_still_tells_who_failed(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("DROP TABLE round_results")
        connection.execute("""UPDATE round SET failed = '["nano"]' WHERE number = 1""")
        connection.commit()
    store = Store(old)
    kept = store.load().rounds[0]
    assert (kept.failed, kept.results) == (("nano",), (DeviceResult("nano", "no usable reply", share=0.0),))
    store.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_of_every_version_is_brought_to_the_newest(old: Path, version: str) -> None:
    with engine_of(old) as engine, engine.begin() as connection:
        upgrade(connection, now, version)
    store = Store(old, now)
    assert_all_is_there(store.load())
    store.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tables_are_those_that_the_code_expects_whatever_they_come_from(location: Path | URL, version: str) -> None:
    with engine_of(location) as engine:
        with engine.begin() as connection:
            upgrade(connection, now, version)
        with engine.begin() as connection:
            upgrade(connection, now)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []


def tables_of(engine: Engine) -> dict[str, Any]:
    """The definition and the rows of every table, independent of the order of columns."""
    found = {}
    with engine.connect() as connection:
        inspector = inspect(connection)
        for table in inspector.get_table_names():
            columns = {each["name"]: (str(each["type"]), each["nullable"]) for each in inspector.get_columns(table)}
            rows = [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]
            found[table] = (
                columns,
                inspector.get_pk_constraint(table)["constrained_columns"],
                sorted(str(each["column_names"]) for each in inspector.get_unique_constraints(table)),
                sorted(str(each["column_names"]) for each in inspector.get_indexes(table)),
                rows,
            )
    return found


def test_an_empty_database_gets_at_once_what_all_migrations_make_of_it(location: Path | URL) -> None:
    with engine_of(location) as engine:
        with engine.begin() as connection:
            upgrade(connection, now)
        at_once = tables_of(engine)
        with engine.begin() as connection:
            for table in at_once:
                connection.execute(text(f"DROP TABLE {table}"))
        with engine.begin() as connection:
            upgrade(connection, now, VERSIONS[0])
        assert at_once == tables_of(engine)


def test_the_tables_of_an_old_file_are_those_that_the_code_expects(old: Path) -> None:
    Store(old).close()
    with engine_of(old) as engine, engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_a_database_of_a_newer_version_is_refused(location: Path | URL) -> None:
    Store(location).close()
    with engine_of(location) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
        if engine.dialect.name == "sqlite":  # as the newer version does
            checksums.seal(driver_connection(connection))
    with pytest.raises(InvalidInputError, match=r"written by a newer version of Wattfleet \(tables 0999"):
        Store(location)
    with engine_of(location) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :it"), {"it": VERSIONS[0]})
        if engine.dialect.name == "sqlite":
            checksums.seal(driver_connection(connection))
    Store(location).close()  # and it has released the database


def test_an_upgrade_that_fails_half_way_leaves_the_file_as_it_was(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        before = list(connection.iterdump())

    def refuse(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.strip().startswith("DROP TABLE round_results"):
            raise OSError("the power is cut")

    event.listen(Engine, "before_cursor_execute", refuse)
    try:
        with pytest.raises(InvalidInputError, match="the power is cut"):
            Store(old)
    finally:
        event.remove(Engine, "before_cursor_execute", refuse)
    with closing(sqlite3.connect(old)) as connection:
        assert list(connection.iterdump()) == before
    store = Store(old, now)
    assert_all_is_there(store.load())
    store.close()
