"""How the database of a store is specified, and that no message contains its password."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, text

from coordinator.errors import StoreInUseError, StoreUnavailableError
from coordinator.store.database import database_url, display_name
from coordinator.store.store import Store
from tests.fakes.records_to_store import BLANK, assert_devices
from wattfleet.errors import InvalidInputError

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
    with pytest.raises((InvalidInputError, StoreUnavailableError), match="cannot be used as the coordinator's store"):
        Store(postgresql_database)
    store = Store(postgresql_database.update_query_dict({"options": "-c search_path=fleet"}))
    store.save(BLANK)
    assert_devices(store.load(), BLANK)
    store.close()
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA fleet CASCADE"))
    engine.dispose()
