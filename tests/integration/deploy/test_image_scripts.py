"""The scripts that build images or are installed in them, and the commands in Dockerfiles."""

from __future__ import annotations

import runpy
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.certified import CertifiedFleet

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


def test_a_server_without_tls_is_not_healthy_where_tls_is_expected(tmp_path: Path) -> None:
    authority = CertifiedFleet.create(tmp_path / "authority").authority
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.folder / "server.pem", authority.folder / "server.key")
    with ThreadPoolExecutor() as threads, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tls:127.0.0.1:{server.getsockname()[1]}"

        def serve(protected: bool) -> None:
            connection, _ = server.accept()
            with connection:
                if protected:
                    context.wrap_socket(connection, server_side=True).close()
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        for protected, returncode in ((True, 0), (False, 1)):
            served = threads.submit(serve, protected)
            assert healthcheck(address).returncode == returncode
            served.result(20)
