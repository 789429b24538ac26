"""The scripts that images are built with, and that they carry."""

from __future__ import annotations

import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "deploy" / "image"


def test_an_extra_that_names_the_project_is_followed() -> None:
    pytest.importorskip("tomllib", reason="images have Python 3.11, whose standard library reads TOML")
    requirements = runpy.run_path(str(ROOT / "dependencies" / "requirements.py"))["requirements"]
    project = {
        "name": "wattfleet",
        "dependencies": ["numpy>=1"],
        "optional-dependencies": {
            "agent": ["grpcio"],
            "coordinator": ["grpcio", "sqlalchemy>=2"],
            "wattfleet_simulation": ["wattfleet[agent, coordinator]", "psutil"],
        },
    }
    assert requirements(project, "agent") == ["grpcio", "numpy>=1"]
    assert requirements(project, "wattfleet_simulation") == ["grpcio", "numpy>=1", "psutil", "sqlalchemy>=2"]


def healthcheck(*addresses: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-IS", IMAGE / "healthcheck.py", *addresses],
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_healthy_is_when_every_address_answers(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        up = f"tcp:127.0.0.1:{tcp.getsockname()[1]}"
        assert healthcheck(up, f"unix:{path}").returncode == 0

        absent = healthcheck(up, f"unix:{tmp_path / 'other.sock'}")
    assert absent.returncode == 1
    assert "other.sock" in absent.stderr


def test_a_socket_that_nobody_listens_on_is_not_healthy(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
    assert path.exists()
    assert healthcheck(f"unix:{path}").returncode == 1
