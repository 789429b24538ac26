"""The options of `wattfleet-supernode`, those of an enrolled device, and an unknown version of Flower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flwr
import pytest

pytest.importorskip("flwr.supernode.start_client_internal")
pytest.importorskip("flwr.supernode.fleet_http_connection")

from flwr.common.config import parse_config_args
from flwr.supernode import fleet_http_connection, start_client_internal

from tests.fakes.served import CertifiedFleet
from wattfleet.common.identity.identity_folder import Identity
from wattfleet.common.identity.peers import Role
from wattfleet.common.identity.supernode_folder import SuperNodeKey, update_supernode, write_supernode
from wattfleet.flower.flower_version import unsupported_version
from wattfleet.flower.supernode import command
from wattfleet.flower.supernode.fleet_client import EnrolledClient, SteadyClient

# --- Supernode command ------------------------------------------------------------------------------------------------
# The options of `wattfleet-supernode`, and its behaviour with an unknown version of Flower.

pytestmark = pytest.mark.skipif(unsupported_version() != "", reason="another Flower is left as it is")

SEAMS = ("http_request_response", "time", "subprocess")


class Flower:
    """Flower's own command, which only records its arguments."""

    def __init__(self) -> None:
        self.arguments: list[list[str]] = []

    def __call__(self) -> None:
        self.arguments.append(sys.argv[1:])


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch, restored_seams: None) -> Flower:
    flower = Flower()
    monkeypatch.setattr(command, "flower_supernode", flower)
    return flower


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["wattfleet-supernode", *arguments])
    command.main()


def test_flower_gets_all_options_but_the_two_of_its_own(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> None:
    flowers = ["--insecure", "--node-config", 'device-id="a"', "--port", "9094"]
    run(monkeypatch, *flowers[:2], flowers[2], "--poll-s", "0.5", *flowers[3:], "--warm-imports=torch")
    assert flower.arguments == [flowers]


def test_the_superexec_gets_flowers_options_and_the_imports(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(command.subprocess, "Popen", commands.append)
    run(monkeypatch, "--warm-imports", "torch,numpy")
    start_client_internal.subprocess.Popen(["flower-superexec", "--insecure", "--parent-pid", "7"])
    [[python, *_, settings, insecure, parent, pid]] = commands
    assert python == sys.executable and (insecure, parent, pid) == ("--insecure", "--parent-pid", "7")
    assert json.loads(settings)["imports"] == ["torch", "numpy"] and not json.loads(settings)["learn"]


def test_without_warm_imports_flower_starts_its_own_superexec(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--warm-imports", "none")
    assert start_client_internal.subprocess is subprocess


def test_an_unknown_flower_runs_as_it_is(
    flower: Flower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = [getattr(start_client_internal, name) for name in SEAMS]
    monkeypatch.setattr(flwr, "__version__", "1.30.0")
    run(monkeypatch, "--insecure", "--poll-s", "1")
    assert flower.arguments == [["--insecure"]]
    assert [getattr(start_client_internal, name) for name in SEAMS] == before
    assert "runs as flower-supernode: it supports Flower 1.41.x or 1.42.x, but 1.30.0 is installed" in caplog.text


def test_a_flower_without_the_replaced_names_runs_as_it_is(
    flower: Flower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(start_client_internal, "http_request_response")
    run(monkeypatch)
    assert flower.arguments == [[]]
    assert "has no http_request_response" in caplog.text


@pytest.mark.parametrize("value", ["0", "-1", "nan", "61", "soon"])
def test_a_pause_that_makes_no_sense_is_refused(
    flower: Flower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, f"--poll-s={value}")
    assert "--poll-s" in capsys.readouterr().err
    assert not flower.arguments


def test_the_help_shows_its_own_options_and_flowers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wattfleet.flower.supernode", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--poll-s", "--warm-imports", "--superlink", "--isolation"):
        assert option in done.stdout


WITHOUT_FLOWER = """
import sys
class Absent:
    def find_spec(self, name, *others):
        if name == "flwr":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent())
from wattfleet.flower.supernode.__main__ import main
main()
"""


def test_without_flower_it_says_what_to_install() -> None:
    done: Any = subprocess.run([sys.executable, "-c", WITHOUT_FLOWER], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "wattfleet-supernode: Flower is not installed: pip install 'wattfleet[flower]'\n"


# --- Enrolled options -------------------------------------------------------------------------------------------------
# The options with which an enrolled device's SuperNode starts.


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
