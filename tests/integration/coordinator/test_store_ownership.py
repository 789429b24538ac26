"""One coordinator plans at a time: a second is refused or waits; one that was taken over stops writing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tenacity
from sqlalchemy import URL, create_engine, text

from coordinator.errors import NotOwnerError, StoreInUseError, StoreUnavailableError
from coordinator.repository.repository import open_store
from coordinator.settings import StoreSettings
from coordinator.state.records import RunRecord
from coordinator.store.database import database_url
from coordinator.store.ownership import AdvisoryLock, FileLock
from coordinator.store.store import Store
from tests.fakes.records_to_store import BLANK, assert_devices, planned_round
from tests.fakes.small_fleet import NODES, RUN, small_fleet

_WITHIN_S = 30.0


def lose_the_lock(location: Path | URL, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the coordinator's lock without its noticing, as when its machine was cut off."""
    for kind in (FileLock, AdvisoryLock):
        monkeypatch.setattr(kind, "take", lambda _: True)


def test_a_second_coordinator_is_refused_and_told_what_to_do(location: Path | URL) -> None:
    first = Store(location)
    with pytest.raises(StoreInUseError, match=r"another coordinator uses .*--standby"):
        Store(location)
    first.save(BLANK)
    first.close()
    second = Store(location)
    assert_devices(second.load(), BLANK)
    second.close()


def test_two_names_of_one_file_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "coordinator.db")
    first = Store(tmp_path / "coordinator.db")
    for other in (tmp_path / "folder" / ".." / "coordinator.db", tmp_path / "link.db"):
        with pytest.raises(StoreInUseError):
            Store(other)
    first.close()


def test_stores_of_different_databases_have_different_owners(location: Path | URL, tmp_path: Path) -> None:
    first, second = Store(location), Store(tmp_path / "another.db")
    first.close()
    second.close()


def test_of_two_coordinators_that_plan_one_round_the_newest_owner_wins(
    location: Path | URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_lock(location, monkeypatch)
    first, first_fleet = Store(location), small_fleet()
    first.save(*first_fleet.agents.devices.values(), first_fleet.flower.run(RUN))
    first_plan = first_fleet.flower.plan(RUN, 1, NODES, 1.0)

    second, second_fleet = Store(location), small_fleet(site_budget_w=40.0)
    second_plan = second_fleet.flower.plan(RUN, 1, NODES, 1.0)
    assert second_plan.plan_id == first_plan.plan_id and second_plan != first_plan

    with pytest.raises(NotOwnerError, match="another coordinator has taken the store over"):
        first.save(first_plan)
    assert second.load().rounds == []
    second.save(second_plan)
    for refused in (
        lambda: first.save(BLANK),
        lambda: first.save(RunRecord(RUN, "FedAvg", 1, finished=True)),
        first.load,
    ):
        with pytest.raises(NotOwnerError):
            refused()
    assert second.load().rounds == [second_plan]
    assert not second.load().runs[0].finished
    first.close()
    second.close()


def test_an_owner_that_was_planning_is_waited_for_or_loses(
    postgresql_database: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_lock(postgresql_database, monkeypatch)
    first = Store(postgresql_database)
    begun: list[StoreUnavailableError] = []
    with first._transaction() as connection:  # noqa: SLF001 - in the middle of a save
        patience = {"options": "-c lock_timeout=100ms"}
        try:
            Store(postgresql_database.update_query_dict(patience))
        except StoreUnavailableError as error:
            begun.append(error)
        connection.execute(text("SELECT 1"))
    assert "lock timeout" in str(begun[0]), "no term begins while the last owner is writing"
    second = Store(postgresql_database)
    with pytest.raises(NotOwnerError):
        first.save(planned_round())
    first.close()
    second.close()


async def test_a_coordinator_stands_by_until_the_other_is_gone(location: Path | URL) -> None:
    first = Store(location)
    first.save(BLANK)
    tried: list[float] = []

    async def sleep(seconds: float) -> None:
        tried.append(seconds)
        if len(tried) == 3:
            first.close()

    second = await open_store(location, StoreSettings(standby=True), sleep)
    assert len(tried) == 3
    assert_devices(second.load(), BLANK)
    second.close()


async def test_a_coordinator_that_is_not_to_stand_by_does_not(location: Path | URL) -> None:
    async def never(_: float) -> None:
        pytest.fail("it waits")

    first = Store(location)
    with pytest.raises(StoreInUseError):
        await open_store(location, sleep=never)
    first.close()


async def test_standing_by_outlasts_a_database_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception | None] = [StoreUnavailableError("refused"), StoreUnavailableError("refused"), None]

    def opened(location: Path | URL) -> Store:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return Store(location)

    async def sleep(_: float) -> None:
        pass

    with caplog.at_level("INFO"):
        (await open_store(tmp_path / "c.db", StoreSettings(standby=True), sleep, opened)).close()
    assert [record.getMessage() for record in caplog.records if record.name == "coordinator.repository.repository"] == [
        "standby: refused"
    ]


OWNER = """
import sys, time
from coordinator.store.database import database_url
from coordinator.store.store import Store
from tests.fakes.records_to_store import BLANK
store = Store(database_url(sys.argv[1]))
store.save(BLANK)
print("owns", flush=True)
time.sleep(600)
"""


def test_the_store_of_a_killed_coordinator_is_taken_over_with_all_its_records(
    location: Path | URL,
) -> None:
    url = location if isinstance(location, URL) else database_url(location)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, url.render_as_string(hide_password=False)], stdout=subprocess.PIPE
    ) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == b"owns\n"
            with pytest.raises(StoreInUseError):
                Store(location)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
        # PostgreSQL soon notices that a client is gone.
        store = tenacity.retry(
            retry=tenacity.retry_if_exception_type(StoreInUseError),
            stop=tenacity.stop_after_delay(_WITHIN_S),
            wait=tenacity.wait_fixed(0.01),
            reraise=True,
        )(Store)(location)
    assert_devices(store.load(), BLANK)
    store.close()


def test_an_owner_whose_lock_was_cut_takes_it_again_before_another_can(postgresql_database: URL) -> None:
    store = Store(postgresql_database)
    engine = create_engine(postgresql_database, isolation_level="AUTOCOMMIT")
    with engine.connect() as other:
        other.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid != pg_backend_pid()"
            )
        )
        while other.scalar(text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")):
            time.sleep(0.01)
    engine.dispose()
    store.save(BLANK)
    with pytest.raises(StoreInUseError):
        Store(postgresql_database)
    store.close()
