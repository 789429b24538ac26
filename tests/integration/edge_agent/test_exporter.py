"""The agent's own metrics: what a real agent serves, and who may read it from other machines."""

from __future__ import annotations

import http.client
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from edge_agent.exporter import read_url
from tests.fakes.coordinator_in_process import CoordinatorInProcess
from tests.fakes.fittings import fitting_here
from tests.fakes.polling import until
from tests.fakes.prometheus import promtool
from tests.fakes.running_agent import RunningAgent, agent, new_board, ready_agent
from tests.fakes.served import CertifiedFleet
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.authority import DEVICE_NAME
from wattfleet.common.identity.identity_folder import Identity, write_identity, write_renewed
from wattfleet.common.identity.peers import Role
from wattfleet.core.modes import array_to_modes

DEVICE = "orin-nano-0"
ANYWHERE = "0.0.0.0:0"
WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)
    monkeypatch.setattr("edge_agent.runtime.states.INTERVAL_S", 0.02)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorInProcess]:
    with CoordinatorInProcess(tmp_path, 6).running() as running:
        yield running


@pytest.fixture
def fleet(tmp_path: Path) -> CertifiedFleet:
    return CertifiedFleet.create(tmp_path / "authority")


@pytest.fixture
def enrolled(fleet: CertifiedFleet, tmp_path: Path) -> Identity:
    """The identity of the device, in its state directory."""
    identity = fleet.identity(Role.DEVICE, DEVICE, board="orin-nano")
    write_identity(tmp_path / "state" / "identity", identity)
    return identity


def url_of(running: RunningAgent) -> str:
    """The URL at which a starting agent serves its metrics."""
    folder = running.settings.device.state_dir
    until(lambda: read_url(folder) is not None or running.has_ended)
    url = read_url(folder)
    assert url is not None, running.error
    return url


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=WITHIN_S) as response:
        text = response.read().decode()
    promtool("check", "metrics", text=text)
    return {name: float(value) for name, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.MULTILINE)}


@pytest.fixture
def https(fleet: CertifiedFleet, tmp_path: Path) -> Callable[[str, Identity | None], tuple[str, str]]:
    """Read a URL with an identity, as Prometheus does; returns the text and the server certificate's serial number.

    A refusal raises an error.
    """

    def read(url: str, identity: Identity | None) -> tuple[str, str]:
        context = fleet.https_context(identity, tmp_path / "caller")
        port = split_address(url.removeprefix("https://").removesuffix("/metrics"))[1]
        with socket.create_connection(("127.0.0.1", port), WITHIN_S) as plain:
            with context.wrap_socket(plain, server_hostname=DEVICE_NAME) as connection:
                certificate = connection.getpeercert()
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                response = http.client.HTTPResponse(connection)
                response.begin()
                if response.status != 200:
                    raise http.client.HTTPException(response.read())
                assert certificate is not None
                return response.read().decode(), str(certificate["serialNumber"]).lower()

    return read


def test_an_agent_serves_what_its_board_does(tmp_path: Path, coordinator: CoordinatorInProcess) -> None:
    board = new_board()
    with ready_agent(coordinator, tmp_path, board, metrics_address="127.0.0.1:0") as running:
        url = url_of(running)
        assert url.startswith("http://127.0.0.1:")
        until(lambda: "wattfleet_board_cpu_clock_hertz" in scraped(url))
        parked = board.current_mode()
        until(lambda: scraped(url)["wattfleet_board_cpu_clock_hertz"] == parked.cpu_khz * 1e3)
        found = scraped(url)
        assert found[f'wattfleet_agent_info{{board="orin-nano",device="{DEVICE}",provenance="simulated"}}'] == 1
        assert found['wattfleet_agent_state{state="ready"}'] == 1
        assert found["wattfleet_board_power_watts"] == pytest.approx(board.activity().power_mw / 1e3, rel=0.2)
        assert (found["wattfleet_agent_connected"], found["wattfleet_agent_profiled_modes"]) == (1, 6)
        assert found["wattfleet_agent_trainings_total"] == 0 and found["process_open_fds"] > 0
        assert "wattfleet_agent_granted_watts" not in found and "wattfleet_agent_modes_to_measure" not in found
        mode, during = array_to_modes(board.modes)[500], {}

        def train() -> None:
            until(lambda: scraped(url)["wattfleet_board_gpu_clock_hertz"] == mode.gpu_hz)
            during.update(scraped(url))

        assert running.round("run/1", mode, train)
        assert during['wattfleet_agent_state{state="training"}'] == 1 and during["wattfleet_agent_granted_watts"] == 25
        after = scraped(url)
        assert after["wattfleet_agent_trainings_total"] == 1
        assert after["wattfleet_board_energy_joules_total"] >= found["wattfleet_board_energy_joules_total"]
        coordinator.go()
        until(lambda: scraped(url)["wattfleet_agent_connected"] == 0)
        coordinator.come()
    assert read_url(tmp_path / "state") is None


def test_without_an_address_an_agent_serves_no_metrics(tmp_path: Path, coordinator: CoordinatorInProcess) -> None:
    with ready_agent(coordinator, tmp_path, new_board()):
        assert read_url(tmp_path / "state") is None


def test_other_machines_need_a_viewers_certificate(
    tmp_path: Path,
    coordinator: CoordinatorInProcess,
    fleet: CertifiedFleet,
    enrolled: Identity,
    https: Callable[[str, Identity | None], tuple[str, str]],
) -> None:
    stranger = CertifiedFleet.create(tmp_path / "another authority")
    with agent(coordinator, tmp_path, new_board(), metrics_address=ANYWHERE) as running:
        url = url_of(running)
        for role in (Role.VIEWER, Role.OPERATOR):
            text, serial = https(url, fleet.identity(role))
            assert "wattfleet_board_power_readable" in text
            assert serial.lstrip("0") == enrolled.certificate.serial
        expired = fleet.identity(Role.VIEWER, "prometheus", timedelta(seconds=-1))
        others = [fleet.identity(role) for role in (Role.DEVICE, Role.FLOWER, Role.SUPERLINK)]
        for refused in (None, *others, expired, stranger.identity(Role.VIEWER)):
            with pytest.raises((OSError, http.client.HTTPException)):
                https(url, refused)
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(url.replace("https", "http").replace("0.0.0.0", "127.0.0.1"), timeout=WITHIN_S)


def test_a_renewed_certificate_is_served_without_a_restart(
    tmp_path: Path,
    coordinator: CoordinatorInProcess,
    fleet: CertifiedFleet,
    enrolled: Identity,
    https: Callable[[str, Identity | None], tuple[str, str]],
) -> None:
    viewer, folder = fleet.identity(Role.VIEWER), tmp_path / "state" / "identity"
    with agent(coordinator, tmp_path, new_board(), metrics_address=ANYWHERE) as running:
        url = url_of(running)
        https(url, viewer)
        renewed = fleet.renewed(enrolled)
        write_renewed(folder, renewed)
        assert https(url, viewer)[1].lstrip("0") == renewed.certificate.serial
        (folder / "certificate.pem").write_text("damaged")
        assert https(url, viewer)[1].lstrip("0") == renewed.certificate.serial


def test_plaintext_reaches_other_machines_only_if_that_was_asked_for(
    tmp_path: Path, coordinator: CoordinatorInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with ready_agent(coordinator, tmp_path, new_board(), metrics_address=ANYWHERE, insecure=True) as running:
        assert scraped(url_of(running).replace("0.0.0.0", "127.0.0.1"))["wattfleet_agent_connected"] == 1
    assert "the address of the metrics, 0.0.0.0:0, is plaintext: anybody on the network" in caplog.text
