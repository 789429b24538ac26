"""A full disk, a locked database or an unreachable server: a typed error, and no data is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import sqlite3
import string
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import URL, create_engine, event, text
from sqlalchemy.pool import Pool

from coordinator.errors import StoreFullError, StoreUnavailableError, UnstorableRecordError
from coordinator.repository.repository import open_store
from coordinator.repository.writer import Writer
from coordinator.services.request_limits import STATUS
from coordinator.settings import StoreSettings
from coordinator.state.records import DeviceRecord, RunRecord
from coordinator.store.store import Store
from tests.fakes.fronts import front
from tests.fakes.postgresql import PostgresServer
from tests.fakes.records_to_store import BLANK, assert_devices, finished_round, rounds_of
from tests.fakes.small_fleet import RUN
from tests.fakes.workload_fronts import for_all
from wattfleet_proto.error_boundary import status_of

_WITHIN_S = 60.0
_SOON_S = 0.01


IMPATIENT = StoreSettings(lock_timeout_s=0.02)


async def soon(_: float) -> None:
    await asyncio.sleep(_SOON_S)


def device(number: int, points: int = 1) -> DeviceRecord:
    widest = front(*((1.0 + k, 100.0 - k) for k in range(points)))
    return dataclasses.replace(BLANK, device_id=f"device-{number}", fronts=for_all(widest))


def through_trouble(
    store: Store,
    trouble: Callable[[], Any],
    end: Callable[[], Any],
    kind: type[StoreUnavailableError],
    status: grpc.StatusCode,
) -> str:
    """Save records before, during and after a failure; returns the errors that were reported."""
    said: list[str] = []

    async def story() -> None:
        writer = Writer(store, soon)
        await writer.save(device(0))
        trouble()
        try:
            with pytest.raises(StoreUnavailableError) as refusal:
                for number in range(1, 1_000):
                    await writer.save(device(number, points=64))
            assert type(refusal.value) is kind
            assert status_of(refusal.value, STATUS) is status
            said.append(str(refusal.value))
            refused = number
        finally:
            end()
        await writer.save(device(1_000))
        await writer.close()
        assert_devices(store.load(), device(0), *(device(k, 64) for k in range(1, refused + 1)), device(1_000))

    async def within() -> None:
        async with asyncio.timeout(_WITHIN_S):
            await story()

    asyncio.run(within())
    store.close()
    assert "\n" not in said[0]
    return said[0]


@contextmanager
def pages_at_most(pages: list[int]) -> Iterator[None]:
    """SQLite files with a limited number of pages, which SQLite treats as a full disk."""

    def limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages[-1]}")

    event.listen(Pool, "checkout", limit)
    try:
        yield
    finally:
        event.remove(Pool, "checkout", limit)


def test_a_full_disk_under_a_file(tmp_path: Path) -> None:
    path, unlimited = tmp_path / "coordinator.db", 1_000_000_000
    pages = [unlimited]
    with pages_at_most(pages):
        said = through_trouble(
            Store(path),
            trouble=lambda: pages.append(100),
            end=lambda: pages.append(unlimited),
            kind=StoreFullError,
            status=grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    assert said == f"the coordinator's store is unavailable: {path}: database or disk is full: free some space"


def test_a_disk_that_somebody_else_fills(small_disk: Path) -> None:
    path, rest = small_disk / "coordinator.db", small_disk / "rest"

    def fill() -> None:
        with open(rest, "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    said = through_trouble(Store(path), fill, rest.unlink, StoreFullError, status=grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert said == f"the coordinator's store is unavailable: {path}: database or disk is full: free some space"


def test_a_file_that_is_locked_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "coordinator.db"
    store = Store(path, settings=IMPATIENT)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        said = through_trouble(
            store,
            trouble=lambda: other.execute("BEGIN EXCLUSIVE"),
            end=lambda: other.execute("ROLLBACK"),
            kind=StoreUnavailableError,
            status=grpc.StatusCode.UNAVAILABLE,
        )
    assert said.endswith("database is locked")


async def test_a_file_that_is_locked_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.db"
    store = Store(path)

    writer = Writer(store, soon)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        saved = asyncio.create_task(writer.save(BLANK))
        await asyncio.sleep(0.1)
        assert not saved.done()
        other.execute("ROLLBACK")
        await saved
    await writer.close()
    assert_devices(store.load(), BLANK)
    store.close()


def test_rounds_are_read_from_a_file_that_is_being_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "coordinator.db", settings=IMPATIENT)
    store.save(finished_round(1))
    with closing(sqlite3.connect(tmp_path / "coordinator.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM round")
        assert rounds_of(store, RUN) == [finished_round(1)]
        assert len(store.history_of(RUN).rounds) == 1
    store.close()


def test_a_full_disk_under_postgresql(postgresql_database: URL) -> None:
    store = Store(postgresql_database)
    engine = create_engine(postgresql_database, isolation_level="AUTOCOMMIT")
    with engine.connect() as other:
        # The server's error for a full disk, without filling one.
        other.execute(
            text(
                "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS"
                " 'BEGIN RAISE EXCEPTION ''could not extend file'' USING ERRCODE = ''53100''; END'"
            )
        )
        said = through_trouble(
            store,
            trouble=lambda: other.execute(
                text("CREATE TRIGGER full_disk BEFORE INSERT ON device EXECUTE FUNCTION no_room()")
            ),
            end=lambda: other.execute(text("DROP TRIGGER full_disk ON device")),
            kind=StoreFullError,
            status=grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    engine.dispose()
    assert said.endswith("could not extend file")


def test_a_table_of_postgresql_that_is_locked_for_long(postgresql_database: URL) -> None:
    # Combined with other options, such as the one that selects a schema.
    store = Store(postgresql_database.update_query_dict({"options": "-c search_path=public -c lock_timeout=20ms"}))
    engine = create_engine(postgresql_database)
    with engine.connect() as other:
        said = through_trouble(
            store,
            trouble=lambda: other.execute(text("LOCK TABLE device IN ACCESS EXCLUSIVE MODE")),
            end=other.rollback,
            kind=StoreUnavailableError,
            status=grpc.StatusCode.UNAVAILABLE,
        )
    engine.dispose()
    assert said.endswith("canceling statement due to lock timeout")


async def test_a_name_too_long_for_a_postgresql_index_blocks_no_other_record(
    postgresql_database: URL,
) -> None:
    store = Store(postgresql_database)
    endless = "".join(random.Random(1).choices(string.ascii_letters, k=20_000))  # random, so hardly compressible

    writer = Writer(store, soon)
    refused, first = await asyncio.gather(
        writer.save(RunRecord(endless, "FedAvg", 1)), writer.save(device(1)), return_exceptions=True
    )
    assert isinstance(refused, UnstorableRecordError) and "cannot store a value: index row" in str(refused)
    assert first is None
    await writer.save(device(2))
    await writer.close()
    assert_devices(store.load(), device(1), device(2))
    assert store.load().runs == []
    store.close()


# --- at the start -------------------------------------------------------------------------------------------------


async def test_a_file_that_is_locked_at_the_start_is_waited_for_on_standby(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "coordinator.db"
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailableError, match="cannot be used as the coordinator's store: database is lock"):
            Store(path, settings=IMPATIENT)

        async def unlock(_: float) -> None:
            other.execute("ROLLBACK")

        (await open_store(path, StoreSettings(standby=True, lock_timeout_s=0.02), unlock)).close()


def test_a_file_that_no_room_is_left_for_at_the_start_is_said_to_be_full(tmp_path: Path) -> None:
    path, pages = tmp_path / "coordinator.db", [1]
    with pages_at_most(pages):
        with pytest.raises(StoreFullError, match="cannot be used as the coordinator's store: database or disk is full"):
            Store(path)
        pages.append(1_000_000_000)
        Store(path).close()


@pytest.mark.parametrize("exists", [True, False])
def test_a_disk_that_is_full_at_the_start_is_said_to_be(small_disk: Path, exists: bool) -> None:
    if exists:
        Store(small_disk / "coordinator.db").close()
    with open(small_disk / "rest", "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(StoreFullError, match=r"coordinator\.db cannot be used .*disk is full: free some space$"):
        Store(small_disk / "coordinator.db")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_goes_and_comes_back(
    postgresql: PostgresServer, postgresql_database: URL, how: signal.Signals
) -> None:
    said = through_trouble(
        Store(postgresql_database),
        trouble=lambda: postgresql.stop(how),
        end=postgresql.start,
        kind=StoreUnavailableError,
        status=grpc.StatusCode.UNAVAILABLE,
    )
    assert said.startswith(f"the coordinator's store is unavailable: postgresql://127.0.0.1:{postgresql.port}/")
