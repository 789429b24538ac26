"""Databases that stores are tested on, and what a coordinator is served with."""

from __future__ import annotations

import json
import socketserver
import tempfile
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import URL

from coordinator import server as coordinator_server
from coordinator.server import CoordinatorConfig
from coordinator.site_file import SiteFile
from tests.postgresql import PostgresServer, postgres_server
from wattfleet.artefact import Artefact, pack, write_directory
from wattfleet.boards import board
from wattfleet.physics import PowerParameters, TimeParameters, power_mw, step_time_ms
from wattfleet.planning.policies.fastest_k import Everyone
from wattfleet.profile import Profile
from wattfleet.roofline import RooflinePredictor
from wattfleet.workload import Workload


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


@pytest.fixture(scope="module")
def artefact() -> Artefact:
    """A predictor fitted to thirty modes of a board whose physics is known."""
    time = TimeParameters(80, 20, 20, 30, 10, 50, 1, 4, 1, 0.12, 1, 1, 4)
    power = PowerParameters(9_000, 50, 400, 2_000, 8_000, 500, 300, 3_000, 700, 1, 1, 1, 0.5)
    space = board("agx-orin").space.array()
    modes = space[np.random.default_rng(1).choice(len(space), 30, replace=False)]
    fitted = RooflinePredictor.fit(Profile(modes, step_time_ms(time, modes), power_mw(power, time, modes)))
    return pack(fitted, Workload("resnet18-imagenet", 16, 3125), "agx-orin", {"made": "for tests"}, {})


@pytest.fixture
def another(artefact: Artefact) -> Artefact:
    """The same predictor by another digest."""
    content = json.loads(artefact.manifest)
    content["provenance"]["note"] = "another"
    return Artefact(json.dumps(content).encode(), artefact.weights)


@pytest.fixture
def config(tmp_path: Path, artefact: Artefact, quick_to_stop: None) -> CoordinatorConfig:
    write_directory(artefact, tmp_path / "small-reference")
    return CoordinatorConfig(
        address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        store=tmp_path / "coordinator.db",
        reference=str(tmp_path / "small-reference"),
        site=SiteFile.of_site(100.0),
        policy=Everyone(),
        profile_modes=20,
    )


@pytest.fixture
def quick_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test needs the time that open sessions are given, or that an HTTP server takes to look up from its work."""
    monkeypatch.setattr(coordinator_server, "_STOP_GRACE_S", 0.05)
    monkeypatch.setattr(
        socketserver.BaseServer, "serve_forever", partialmethod(socketserver.BaseServer.serve_forever, 0.01)
    )
