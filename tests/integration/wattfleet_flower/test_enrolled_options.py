"""The options with which an enrolled device's SuperNode starts."""

from __future__ import annotations

import sys
from pathlib import Path

import flwr
import pytest

pytest.importorskip("flwr.supernode.fleet_http_connection")

from flwr.common.config import parse_config_args
from flwr.supernode import fleet_http_connection

from tests.fakes.certified import CertifiedFleet
from wattfleet_flower.supernode import command
from wattfleet_flower.supernode.fleet_client import EnrolledClient, SteadyClient
from wattfleet_identity.identity_folder import Identity
from wattfleet_identity.peers import Role
from wattfleet_identity.supernode_folder import SuperNodeKey, update_supernode, write_supernode

pytestmark = pytest.mark.skipif(not flwr.__version__.startswith("1.41."), reason="another Flower is left as it is")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, restored_seams: None) -> list[list[str]]:
    """The options of each start of Flower's SuperNode, which is replaced by a fake."""
    starts: list[list[str]] = []
    monkeypatch.setattr(command, "flower_supernode", lambda: starts.append(sys.argv[1:]))
    monkeypatch.delenv("WATTFLEET_SUPERNODE", raising=False)
    return starts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own = CertifiedFleet.create(tmp_path / "authority").identity(Role.DEVICE, "orin-3")
    told = Identity(own.key_pem, own.certificate_pem, own.trusted_pem, superlink="site.example:8000")
    write_supernode(tmp_path / "supernode", SuperNodeKey.create(), told)
    update_supernode(tmp_path / "supernode", told, "/run/orin-3.sock")
    return tmp_path / "supernode"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["wattfleet-supernode", *arguments])
    command.main()


def value(options: list[str], name: str) -> str:
    """The value that Flower uses: the last one."""
    return [following for option, following in zip(options, options[1:], strict=False) if option == name][-1]


def test_everything_follows_from_the_enrolment(
    started: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "--enrolled", str(folder))
    [options] = started
    assert value(options, "--superlink") == "site.example:8000"
    assert value(options, "--root-certificates") == str(folder / "trusted.pem")
    assert value(options, "--auth-supernode-private-key") == str(folder / "supernode.key")
    config = parse_config_args([value(options, "--node-config")])
    assert config == {"device-id": "orin-3", "agent-socket": "/run/orin-3.sock"}
    connection = fleet_http_connection.FleetHttpClient.from_server_address("site.example:8000", False, b"", [])
    assert isinstance(connection, EnrolledClient)


def test_options_by_hand_win(started: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_SUPERNODE", str(folder))
    by_hand = ["--superlink=10.0.0.5:8000", "--root-certificates", "ca.pem", "--auth-supernode-private-key", "own"]
    run(monkeypatch, *by_hand, "--node-config", "device-id='other' partition-id=3 fast=true")
    [options] = started
    assert options[: len(by_hand)] == by_hand
    assert [options.count(each) for each in by_hand] == [1] * len(by_hand) and "--superlink" not in options
    config = parse_config_args([value(options, "--node-config")])
    assert config == {"device-id": "other", "partition-id": 3, "fast": True, "agent-socket": "/run/orin-3.sock"}
    connection = fleet_http_connection.FleetHttpClient.from_server_address("10.0.0.5:8000", False, None, [])
    assert type(connection) is SteadyClient


def test_insecure_leaves_the_enrolment_aside(
    started: list[list[str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTFLEET_SUPERNODE", str(folder))
    run(monkeypatch, "--insecure", "--superlink", "10.0.0.5:8000")
    assert started == [["--insecure", "--superlink", "10.0.0.5:8000"]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--enrolled", "nowhere"], "nowhere has no SuperNode key: enrol the device"),
        (["--enrolled", "FOLDER", "--insecure"], "leave out one of them"),
        (["--enrolled", "FOLDER", "--node-config", 'a="b'], "--node-config"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_remedy(
    words: list[str],
    why: str,
    started: list[list[str]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *[str(folder) if word == "FOLDER" else word for word in words])
    assert ended.value.code == 2 and not started
    assert why in capsys.readouterr().err


def test_a_missing_superlink_is_asked_for(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = CertifiedFleet.create(tmp_path / "authority").identity(Role.DEVICE, "orin-3")
    write_supernode(tmp_path / "supernode", SuperNodeKey.create(), own)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--enrolled", str(tmp_path / "supernode"))
    assert "pass --superlink HOST:PORT" in capsys.readouterr().err and not started
