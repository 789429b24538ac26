"""The operator's commands where no coordinator is reachable, and commands that watch one that goes away."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import serving
from tests.fakes.shell import command
from wattfleet.errors import InvalidInputError
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError

EVERY_COMMAND = [
    ["devices"],
    ["device", "orin"],
    ["rounds"],
    ["plan", "--dry-run"],
    ["budget", "show"],
    ["budget", "set", "site", "5"],
    ["budget", "clear", "site"],
    ["tag", "orin", "--add", "a"],
    ["drain", "orin"],
    ["reference", "list"],
    ["reference", "pin", "012345"],
    ["reference", "unpin"],
    ["export", "--out", "tables"],
    ["devices", "--watch"],
]


@pytest.mark.parametrize("arguments", EVERY_COMMAND, ids=" ".join)
def test_every_command_says_in_a_line_that_nobody_answers(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CoordinatorUnreachableError) as away:
        command(*arguments, "--coordinator", "127.0.0.1:1")
    assert str(away.value) == (
        "no coordinator answers at 127.0.0.1:1: start one with `wattfleet coordinator serve`, or name another with"
        " --coordinator"
    )
    assert not away.value.caller_must_correct
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["7070", "http://127.0.0.1:7070", ":7070", "127.0.0.1:http"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{address}' is not an address: write host:port"):
        command("devices", "--coordinator", address)


def test_an_address_that_never_answered_is_not_said_to_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.cli.client._ANSWER_TIMEOUT_S", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(CoordinatorUnreachableError, match=f"no coordinator answers at {address}: start one"):
            command("reference", "list", "--coordinator", address)


def test_the_environment_names_the_coordinator_unless_the_command_line_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(
        CoordinatorUnreachableError, match="no coordinator answers at 127.0.0.1:1, as WATTFLEET_COORDINATOR says:"
    ):
        command("runs")
    with pytest.raises(CoordinatorUnreachableError, match="no coordinator answers at 127.0.0.1:2:"):
        command("runs", "--coordinator", "127.0.0.1:2")


def test_the_environment_allows_plaintext_as_the_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR", "192.0.2.1:1")
    with pytest.raises(InvalidInputError, match="or pass --insecure for plaintext"):
        command("runs")
    monkeypatch.setenv("WATTFLEET_INSECURE", "yes")
    monkeypatch.setattr("coordinator.cli.client._ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("coordinator.cli.client._STREAM_TIMEOUT_S", 0.2)
    monkeypatch.setattr("coordinator.cli.client.CoordinatorClient.runs", lambda *_, **__: [])
    command("runs")


# --- watching -----------------------------------------------------------------------------------------------------


async def test_watching_goes_on_while_the_coordinator_is_away_and_ends_with_ctrl_c(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events during the outage occur between two polls."""
    naps: list[Callable[[], Awaitable[None]]] = []

    loop = asyncio.get_running_loop()

    def nap(_: float) -> None:
        if not naps:
            raise KeyboardInterrupt
        asyncio.run_coroutine_threadsafe(naps.pop(0)(), loop).result(10)

    monkeypatch.setattr("time.sleep", nap)
    async with asyncio.timeout(20), serving(config) as client:
        arguments = ("devices", "--watch", "--coordinator", client.bound.address)

        async def greet() -> None:
            await client.agent().hello("orin")

        naps.append(greet)
        lines = (await asyncio.to_thread(command, *arguments, "--json")).stdout.splitlines()
        assert [[each["device_id"] for each in json.loads(line)] for line in lines] == [[], ["orin"]]

        async def leave() -> None:
            client.stop.set()
            await client.running

        naps.append(leave)
        result = await asyncio.to_thread(command, *arguments)
        assert result.exit_code == 0
        assert "orin" in result.stdout and "no coordinator answers at" in result.stdout


async def test_watching_as_json_goes_on_while_the_coordinator_is_away(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20), serving(config) as client:

        async def leave() -> None:
            client.stop.set()
            await client.running

        naps = [leave]

        def nap(_: float) -> None:
            if not naps:
                raise KeyboardInterrupt
            asyncio.run_coroutine_threadsafe(naps.pop(0)(), loop).result(10)

        monkeypatch.setattr("time.sleep", nap)
        arguments = ("devices", "--watch", "--json", "--coordinator", client.bound.address)
        result = await asyncio.to_thread(command, *arguments)
        assert (result.exit_code, result.stdout) == (0, "[]\n")
        assert result.stderr.startswith("no coordinator answers at ")
