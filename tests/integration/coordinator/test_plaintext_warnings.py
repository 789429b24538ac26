"""Warnings of plaintext that other machines can reach: at every start, on every screen, and in the metrics."""

from __future__ import annotations

import asyncio
import io
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator import listeners
from coordinator.cli import options
from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, certified
from tests.fakes.served import Client, serving
from tests.fakes.shell import command
from wattfleet.errors import InvalidInputError
from wattfleet_identity import channels
from wattfleet_identity.channels import PLAINTEXT_WARNING, Endpoint
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.peers import Role

METRIC = "wattfleet_exposed_plaintext_addresses"
COMMANDS = (["devices"], ["rounds"], ["workloads"], ["budget", "show"], ["reference", "list"])


@pytest.fixture
def others_reach_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat 127.0.0.1 as an address that other machines can reach; nothing listens on a real one."""
    for module in (channels, listeners):
        monkeypatch.setattr(module, "is_loopback", lambda host: False)


@pytest.fixture
async def exposed(config: CoordinatorSettings, others_reach_us: None) -> AsyncIterator[Client]:
    """A coordinator in plaintext on an address that other machines can reach."""
    async with serving(config.with_values(identity={"insecure": True})) as served:
        yield served


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def metric_at(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(METRIC + " ")]
    return float(value)


async def coordinator(*words: str) -> Any:
    """An operator's command against the coordinator that is served here."""
    return await asyncio.to_thread(command, *words)


async def test_every_command_over_an_exposed_connection_warns(exposed: Client) -> None:
    for words in COMMANDS:
        options_ = ("--coordinator", exposed.bound.address, "--insecure")
        done = await coordinator(*words, *options_)
        warning = f"warning: the connection to {exposed.bound.address} is {PLAINTEXT_WARNING}"
        assert warning in " ".join(done.stderr.split()), (words, done.output)
        with pytest.raises(InvalidInputError, match="or pass --insecure for plaintext"):
            await coordinator(*words, "--coordinator", exposed.bound.address)
    assert await asyncio.to_thread(metric_at, exposed.bound.metrics_address) == 3, "RPCs, metrics and page"


async def test_a_watched_screen_keeps_the_warning(exposed: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, drawn = io.StringIO(), []
    monkeypatch.setattr(options, "terminal", lambda: Console(file=shown, force_terminal=True, width=150))

    def slept(_: float) -> None:
        drawn.append(shown.getvalue())
        shown.truncate(0)
        if len(drawn) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", slept)
    await coordinator("devices", "--watch", "--coordinator", exposed.bound.address, "--insecure")
    assert len(drawn) == 3 and all(PLAINTEXT_WARNING in screen for screen in drawn)


async def test_loopback_and_tls_warn_of_nothing(config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(tmp_path / "operator", fleet.identity(Role.OPERATOR))
    assert Endpoint("site.example:7070", tmp_path / "operator").warning is None
    assert Endpoint("site.example:7070", is_insecure=True).warning is not None
    async with serving(config) as served:
        done = await coordinator("devices", "--coordinator", served.bound.address)
        assert (done.exit_code, done.stderr) == (0, "")
        assert await asyncio.to_thread(metric_at, served.bound.metrics_address) == 0


def test_a_fleet_that_moves_over_counts_its_plaintext_address(config: CoordinatorSettings, tmp_path: Path) -> None:
    moving = certified(config, tmp_path, plaintext_address="0.0.0.0:7070", insecure=True)
    assert listeners.exposed_plaintext(moving, has_authority=True) == ["0.0.0.0:7070"]
    protected = certified(config.with_values(server={"address": "0.0.0.0:7070"}), tmp_path)
    assert listeners.exposed_plaintext(protected, has_authority=True) == []
