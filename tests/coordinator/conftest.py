"""Databases that stores are tested on."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL

from tests.postgresql import PostgresServer, postgres_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    # Not pytest's own folder, which is closed to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix="wattfleet-pg-") as folder, postgres_server(Path(folder)) as server:
        yield server


@pytest.fixture
def postgresql_database(postgresql: PostgresServer) -> URL:
    """An empty database."""
    name = f"test_{next(_numbers)}"
    postgresql.execute(f"CREATE DATABASE {name}")
    return postgresql.url(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path | URL:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return tmp_path / "coordinator.db"
    url: URL = request.getfixturevalue("postgresql_database")
    return url
