"""Databases that stores are tested on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.postgresql import PostgresServer, postgres_server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    # Not pytest's own folder, which is closed to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix="wattfleet-pg-") as folder, postgres_server(Path(folder)) as server:
        yield server


@pytest.fixture
def postgresql_database(postgresql: PostgresServer) -> URL:
    """An empty database, without connections that a failed test has left."""
    postgresql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid != pg_backend_pid()"
    )
    postgresql.execute("DROP SCHEMA public CASCADE")
    postgresql.execute("CREATE SCHEMA public")
    return postgresql.url("postgres")


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path | URL:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return tmp_path / "coordinator.db"
    url: URL = request.getfixturevalue("postgresql_database")
    return url
