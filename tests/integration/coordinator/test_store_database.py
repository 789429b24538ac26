"""The store's database: its files, damaged ones, and those of earlier and later versions and of other programs."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import URL, Engine, create_engine, event, inspect, text

from coordinator.errors import DamagedStoreError, StoreInUseError, StoreUnavailableError
from coordinator.state.records import NodeRecord
from coordinator.store import checksums
from coordinator.store.checksums import driver_connection
from coordinator.store.database import database_url, display_name, newest_version, open_engine, upgrade
from coordinator.store.store import Store
from coordinator.store.tables import Base
from tests.fakes.stored_records import (
    BLANK,
    NEXT_VERSION,
    NOW,
    assert_devices,
    everything_in,
    fill,
    next_version,
    served_by,
)
from wattfleet.core.errors import InvalidInputError, WattfleetError

# --- Store database ---------------------------------------------------------------------------------------------------
# How the database of a store is specified, and that no message contains its password.


SECRET = "hunter2-and-more"


@pytest.mark.parametrize(
    ("location", "database"),
    [
        ("fleet.db", "fleet.db"),
        ("/var/lib/a?b #c%20.db", "/var/lib/a?b #c%20.db"),
        (Path("C:/x://y.db"), "C:/x:/y.db"),
        ("sqlite:///fleet.db", "fleet.db"),
        ("sqlite:////var/lib/fleet.db", "/var/lib/fleet.db"),
    ],
)
def test_a_path_or_an_sqlite_url_is_a_file(location: str | Path, database: str) -> None:
    assert database_url(location) == URL.create("sqlite", database=database)


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_postgresql_is_used_through_psycopg(scheme: str) -> None:
    url = database_url(f"{scheme}://fleet:a%40b@db.example:5433/watts?sslmode=require")
    assert (url.drivername, url.username, url.password, url.host) == (
        "postgresql+psycopg",
        "fleet",
        "a@b",
        "db.example",
    )
    assert (url.port, url.database, url.query) == (5433, "watts", {"sslmode": "require"})
    assert display_name(url) == "postgresql://db.example:5433/watts"


@pytest.mark.parametrize(
    "location",
    [
        "",
        f"mysql://fleet:{SECRET}@db/watts",
        f"postgresql+asyncpg://fleet:{SECRET}@db/watts",
        f"postgresql://fleet:x@{SECRET}:port/watts",
        f"postgresql://fleet:{SECRET}@db",
        f"postgresql://fleet:{SECRET}@db:54x2/watts",
        f"://{SECRET}",
        "sqlite://",
        "sqlite:///:memory:",
        f"sqlite:///fleet.db?key={SECRET}",
    ],
)
def test_another_location_is_refused_without_repeating_it(location: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        database_url(location)
    assert SECRET not in str(refusal.value)


def test_a_database_that_does_not_answer_is_named_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    url = database_url(f"postgresql://fleet:{SECRET}@127.0.0.1:1/watts?password={SECRET}&application_name={SECRET}")
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreUnavailableError) as refusal:
        Store(url)
    said = str(refusal.value)
    assert said.startswith("postgresql://127.0.0.1:1/watts cannot be used as the coordinator's store: ")
    assert "refused" in said and "\n" not in said
    assert SECRET not in f"{refusal.value} {caplog.text}"


def test_an_owner_and_what_it_logs_say_no_password(postgresql_database: URL, caplog: pytest.LogCaptureFixture) -> None:
    url = postgresql_database.set(password=SECRET)
    with caplog.at_level(logging.DEBUG):
        store = Store(url)
        store.save(BLANK)
        with pytest.raises(StoreInUseError) as refusal:
            Store(url)
        store.close()
    assert SECRET not in f"{refusal.value} {caplog.text} {store.name}"


def test_a_database_may_have_things_of_others_in_another_schema(postgresql_database: URL) -> None:
    engine = create_engine(postgresql_database)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE device (something text)"))
        connection.execute(text("CREATE SCHEMA fleet"))
    with pytest.raises(InvalidInputError, match="the coordinator's store: it has tables but no version"):
        Store(postgresql_database)
    store = Store(postgresql_database.update_query_dict({"options": "-c search_path=fleet"}))
    store.save(BLANK)
    assert_devices(store.load(), BLANK)
    store.close()
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA fleet CASCADE"))
    engine.dispose()


# --- Store files ------------------------------------------------------------------------------------------------------
# A store in an SQLite file: which files it creates, what it refuses, and what a kill leaves behind.


def test_a_new_store_makes_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "var" / "lib" / "wattfleet" / "fleet.db"
    Store(path).close()
    assert path.is_file()


def test_other_users_may_not_read_a_store(tmp_path: Path) -> None:
    def modes() -> dict[str, int]:
        return {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir())}

    folder = tmp_path / "fleet"
    private = {"fleet": 0o750, "fleet.db": 0o640, "fleet.db.lock": 0o600}
    store = Store(folder / "fleet.db")
    store.save(BLANK)
    assert modes() == {**private, "fleet.db-wal": 0o640, "fleet.db-shm": 0o640}
    store.close()
    assert modes() == private


@pytest.mark.parametrize("name", ["what?.db", "50%20W.db", "a #b.db"])
def test_the_file_has_the_name_that_was_given(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name)
    store.save(BLANK)
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name}.lock"}


def test_what_is_saved_survives_a_process_that_is_killed(tmp_path: Path) -> None:
    # The files while the first process still has them open, as a kill would leave them.
    store = Store(tmp_path / "coordinator.db")
    store.save(BLANK)
    store.save(NodeRecord(2**64 - 1, "nano"))
    left = tmp_path / "left"
    left.mkdir()
    for file in tmp_path.glob("coordinator.db*"):
        shutil.copy(file, left)
    store.close()
    after = Store(left / "coordinator.db")
    assert_devices(after.load(), BLANK)
    assert after.load().nodes == {2**64 - 1: "nano"}
    after.close()


def test_writes_go_through_a_log_that_is_synced_at_every_commit(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    store = Store(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with store._transaction() as connection:  # noqa: SLF001 - each connection has its own setting
        full = 2
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == full
    store.close()


def no_database(path: Path) -> None:
    path.write_bytes(b"cores,cpu_khz\n" * 100)


def a_directory(path: Path) -> None:
    path.mkdir()


def below_a_file(path: Path) -> None:
    path.parent.write_text("")


@pytest.mark.parametrize("made", [no_database, a_directory, below_a_file])
def test_what_is_no_database_is_refused_and_left_alone(tmp_path: Path, made: Callable[[Path], None]) -> None:
    path = tmp_path / "here" / "coordinator.db"
    if made is not below_a_file:
        path.parent.mkdir()
    made(path)
    before = (path.read_bytes(), path.stat().st_mode) if path.is_file() else None
    with pytest.raises(InvalidInputError) as refusal:
        Store(path)
    assert str(refusal.value).startswith(f"{path} cannot be used as the coordinator's store: ")
    assert "\n" not in str(refusal.value)
    assert ((path.read_bytes(), path.stat().st_mode) if path.is_file() else None) == before


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    path.symlink_to(path)
    with pytest.raises(InvalidInputError, match=r"coordinator\.db cannot be used as the coordinator's store: .*link"):
        Store(path)


# --- Store damage -----------------------------------------------------------------------------------------------------
# A damaged file is either read exactly as it was stored, or refused at the start in one line.

_PAGE = 4096
Damage = Callable[[bytearray], None]


def flip(place: int, bits: int) -> Damage:
    def damage(content: bytearray) -> None:
        content[place] ^= bits

    return damage


def overwrite(place: int, value: int) -> Damage:
    def damage(content: bytearray) -> None:
        content[place : place + 512] = bytes([value]) * len(content[place : place + 512])

    return damage


def truncate(length: int) -> Damage:
    def damage(content: bytearray) -> None:
        del content[length:]

    return damage


def damages(size: int, many: int) -> Iterator[tuple[str, Damage]]:
    """Damages by name, the same ones in each run."""
    draw = random.Random(14)
    for place in range(100):  # the header of the file
        yield f"header byte {place}", flip(place, 1 << draw.randrange(8))
    for page in range(size // _PAGE):  # the header of each page
        yield f"page {page}", flip(page * _PAGE + draw.randrange(8), 1 << draw.randrange(8))
    for place in sorted(draw.sample(range(size), many)):
        yield f"byte {place}", flip(place, draw.choice((1, 32, 0xFF)))
    for place in range(0, size, _PAGE // 2 * 5):
        yield f"zeros at {place}", overwrite(place, 0)
        yield f"noise at {place}", overwrite(place, 0xA5)
    for length in (*draw.sample(range(size), 15), *range(_PAGE, size, 9 * _PAGE)):
        yield f"cut to {length}", truncate(length)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_file_serves_what_was_stored_or_is_refused_in_one_line(tmp_path: Path, every: int) -> None:
    path = tmp_path / "coordinator.db"
    fill(path)
    pristine = path.read_bytes()
    right = everything_in(path)
    wrong: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    for name, damage in islice(damages(len(pristine), many=250), None, None, every):
        content = bytearray(pristine)
        damage(content)
        for left in tmp_path.iterdir():
            left.unlink()
        path.write_bytes(content)
        try:
            store = Store(path, lambda: NOW)
        except WattfleetError as refusal:
            said = str(refusal)
            outcomes["refused"] += 1
            if not (said.startswith(str(path)) and "\n" not in said and len(said) < 500 and "restore" in said):
                wrong[name] = f"refused unclearly: {said}"
            continue
        except Exception as error:
            wrong[name] = f"ended the start with {type(error).__name__}: {error}"
            continue
        with closing(store):
            try:
                outcomes["served"] += 1
                if served_by(store) != right:
                    wrong[name] = "served wrong data"
            except Exception as error:
                wrong[name] = f"failed when read with {type(error).__name__}: {error}"
    assert wrong == {}
    assert outcomes["served"] > 20 / every and outcomes["refused"] > 200 / every


def test_a_table_definition_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    fill(path)
    content = path.read_bytes()
    begin = content.index(b"CREATE TABLE ")
    path.write_bytes(content[:begin] + b"CREATE\xceTABLE " + content[begin + len(b"CREATE TABLE ") :])
    with pytest.raises(DamagedStoreError, match="restore a backup"):
        Store(path, lambda: NOW)


# --- Store migrations -------------------------------------------------------------------------------------------------
# Databases of earlier and later versions, and of other programs: upgraded without loss, or refused and left unchanged.


@contextmanager
def engine_of(location: Path | URL) -> Iterator[Engine]:
    engine = open_engine(location if isinstance(location, URL) else database_url(location))
    yield engine
    engine.dispose()


def differences(engine: Engine) -> list[Any]:
    """How the tables of a database differ from those that the code expects."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))


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


def content_of(location: Path | URL) -> dict[str, Any]:
    with engine_of(location) as engine:
        return tables_of(engine)


def test_an_empty_database_gets_at_once_what_all_migrations_make_of_it(location: Path | URL) -> None:
    newest = newest_version()
    assert newest is not None
    with engine_of(location) as engine:
        with engine.begin() as connection:
            upgrade(connection)
        at_once = tables_of(engine)
        with engine.begin() as connection:
            for table in at_once:
                connection.execute(text(f"DROP TABLE {table}"))
        with engine.begin() as connection:
            upgrade(connection, newest)
        assert at_once == tables_of(engine)
        assert differences(engine) == []


def test_an_upgrade_loses_nothing_and_writes_what_is_new(location: Path | URL, tmp_path: Path) -> None:
    fill(location)
    before = everything_in(location)
    with next_version(tmp_path / "migrations"):
        assert everything_in(location) == before
        assert everything_in(location) == before, "it is upgraded already"
        with engine_of(location) as engine, engine.connect() as connection:
            runs = connection.execute(text("SELECT run_id, metric_count FROM run")).all()
            version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
            expected = {(each.run_id, len(each.initial_metrics)) for each in before["runs"]}
            assert (set(map(tuple, runs)), version) == (expected, NEXT_VERSION)
            if isinstance(location, Path):
                assert checksums.is_sealed(driver_connection(connection))
                assert checksums.damaged(driver_connection(connection)) is None


def test_a_database_of_a_newer_version_is_refused(location: Path | URL, tmp_path: Path) -> None:
    fill(location)
    before = everything_in(location)
    with next_version(tmp_path / "migrations"):
        Store(location).close()
    newer = content_of(location)
    known = newest_version()
    refusal = rf"written by a newer version of Wattfleet \(tables made_up; this version knows up to {known}"
    with pytest.raises(InvalidInputError, match=refusal):
        Store(location)
    assert content_of(location) == newer
    if isinstance(location, Path):  # the copy from before the upgrade
        location.with_name(f"{location.name}.tables-{known}.backup").replace(location)
        assert everything_in(location) == before
    else:
        with next_version(tmp_path / "again"):
            Store(location).close()  # and it has released the database


def test_an_upgrade_that_fails_half_way_leaves_the_database_as_it_was(location: Path | URL, tmp_path: Path) -> None:
    fill(location)
    before = everything_in(location)
    content = content_of(location)

    def refuse(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("UPDATE run SET metric_count"):
            raise OSError("the power is cut")

    with next_version(tmp_path / "migrations"):
        event.listen(Engine, "before_cursor_execute", refuse)
        try:
            with pytest.raises(InvalidInputError, match="the power is cut"):
                Store(location)
        finally:
            event.remove(Engine, "before_cursor_execute", refuse)
    assert content_of(location) == content
    assert everything_in(location) == before
    with next_version(tmp_path / "again"):
        assert everything_in(location) == before


def test_an_upgrade_that_cannot_read_a_row_is_refused(location: Path | URL, tmp_path: Path) -> None:
    fill(location)
    with engine_of(location) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE run SET initial_metrics = 'no JSON'"))
    content = content_of(location)
    with next_version(tmp_path / "migrations"), pytest.raises(InvalidInputError) as refusal:
        Store(location)
    said = f"version {newest_version()} cannot be upgraded, because a row cannot be read (JSONDecodeError: "
    assert said in str(refusal.value) and str(refusal.value).endswith(": restore a backup")
    assert content_of(location) == content


TABLES = {
    "of another program": ["CREATE TABLE device (something text)", "INSERT INTO device VALUES ('of others')"],
    "with an empty version": ["CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"],
}


@pytest.mark.parametrize("statements", TABLES.values(), ids=TABLES)
def test_tables_without_a_version_are_refused_and_left_alone(location: Path | URL, statements: list[str]) -> None:
    # Not the store's own engine, which would refuse them, too.
    engine = create_engine(location if isinstance(location, URL) else database_url(location))

    def content() -> object:
        return location.read_bytes() if isinstance(location, Path) else tables_of(engine)

    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    before = content()
    for _ in range(2):  # and the database is released
        with pytest.raises(InvalidInputError) as refusal:
            Store(location)
        assert str(refusal.value).endswith(
            " cannot be used as the coordinator's store: it has tables but no version of them, so it is no store:"
            " name a new file or an empty database, or restore a backup of the store"
        )
    assert content() == before
    engine.dispose()


def test_a_file_that_was_restored_from_a_dump_gets_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    fill(tmp_path / "dumped.db")
    with closing(sqlite3.connect(tmp_path / "dumped.db")) as dumped, closing(sqlite3.connect(path)) as restored:
        restored.executescript("\n".join(dumped.iterdump()))
        assert not checksums.is_sealed(restored)
    assert everything_in(path) == everything_in(tmp_path / "dumped.db")
    with closing(sqlite3.connect(path)) as restored:
        assert checksums.is_sealed(restored)
