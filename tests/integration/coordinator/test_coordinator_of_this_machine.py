"""Commands on the coordinator's own machine find where it serves, and their errors name the address and its origin."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import options
from coordinator.settings import ENVIRONMENT_PREFIX, CoordinatorSettings
from coordinator.systemd.installation import SETTINGS_PATH, STATE_DIRECTORY
from tests.fakes.served import Client, serving
from tests.fakes.shell import command
from wattfleet_identity.identity_folder import read_identity
from wattfleet_io import cli
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is the user's home as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(options, "INSTALLED_SETTINGS", tmp_path / "absent")
    for name in ("WATTFLEET_IDENTITY", "WATTFLEET_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


async def run(*words: str, line: str = "") -> Result:
    """A command of a user of this machine, who names no coordinator."""
    result = await asyncio.to_thread(CliRunner().invoke, cli.wattfleet, list(words), input=line)
    assert result.exit_code == 0, f"{words}: {result.output}{result.exception}"
    return result


def asked() -> str:
    """The error of a command while no coordinator runs."""
    with pytest.raises(CoordinatorUnreachableError) as away:
        command("devices")
    return str(away.value)


@asynccontextmanager
async def served_in(folder: Path, config: CoordinatorSettings) -> AsyncIterator[Client]:
    """A coordinator whose store and authority are in a folder, at an address that no setting names."""
    settings = config.with_values(
        identity={"directory": folder / "wattfleet-identity"},
        store={"location": str(folder / "wattfleet-coordinator.db")},
    )
    async with serving(settings) as client:
        yield client


def test_what_the_commands_read_of_the_settings_is_what_serve_uses() -> None:
    settings = CoordinatorSettings()
    for (group, key), default in options.DEFAULTS.items():
        assert default in ("", str(getattr(getattr(settings, group), key))), f"{group}.{key}"
    assert options.PREFIX == ENVIRONMENT_PREFIX
    assert (SETTINGS_PATH, STATE_DIRECTORY) == ("/etc/wattfleet/coordinator.toml", "/var/lib/wattfleet-coordinator")
    assert str(options.INSTALLED_FOLDER) == STATE_DIRECTORY


async def test_after_init_and_serve_a_machine_is_invited_and_enrols(
    config: CoordinatorSettings, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run("coordinator", "init")
    assert await asyncio.to_thread(asked) == (
        "no coordinator answers at 127.0.0.1:7070, the default address: start one with `wattfleet coordinator serve`,"
        " or name another with --coordinator"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(empty_folder / "settings"))
    async with served_in(Path(), config) as client:
        invited = await run("coordinator", "invite", "--role", "viewer", "--name", "anna")
        line = re.search(r"^wfj1/\S+$", invited.stdout, re.MULTILINE)
        assert line is not None
        joined = await run("join", line=line[0])
        # The user's own identity, as the XDG base directory specification demands.
        found = read_identity(empty_folder / "settings" / "wattfleet" / "identity")
        assert found is not None and found.peer.name == "anna" and not (empty_folder / ".config").exists()
        assert str(empty_folder / "settings" / "wattfleet" / "identity") in joined.stdout
        (empty_folder / "elsewhere").mkdir()
        monkeypatch.chdir(empty_folder / "elsewhere")
        assert "no devices yet" in (await run("coordinator", "devices")).stdout, "asked as anna"
        monkeypatch.chdir(empty_folder)
    address = client.bound.address
    assert f"at {address}, the address in wattfleet-identity/operator: " in await asyncio.to_thread(asked)


@pytest.mark.parametrize("has_authority", [False, True], ids=["plaintext", "TLS"])
@pytest.mark.parametrize("place", ["folder", "settings file", "service"])
async def test_the_coordinator_of_a_folder_a_settings_file_and_the_service_is_found(
    config: CoordinatorSettings,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    has_authority: bool,
) -> None:
    folder = empty_folder if place == "folder" else empty_folder / "site"
    folder.mkdir(exist_ok=True)
    file = folder / "coordinator.toml"
    if place == "settings file":
        authority, store = folder / "wattfleet-identity", folder / "wattfleet-coordinator.db"
        file.write_text(f'[identity]\ndirectory = "{authority}"\n[store]\nlocation = "sqlite:///{store}"\n')
        monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}CONFIG", str(file))
    elif place == "service":
        file.write_text('[server]\naddress = "127.0.0.1:0"\n')
        monkeypatch.setattr(options, "INSTALLED_SETTINGS", file)
        monkeypatch.setattr(options, "INSTALLED_FOLDER", folder)
    if has_authority:
        await run("coordinator", "init", "--identity", str(folder / "wattfleet-identity"))
    async with served_in(folder, config) as client:
        assert "no devices yet" in (await run("coordinator", "devices")).stdout
    found = "the address in" if has_authority else "where the coordinator of"
    assert f"no coordinator answers at {client.bound.address}, {found} " in await asyncio.to_thread(asked)


async def test_operators_with_an_address_of_their_own_are_served_there(
    config: CoordinatorSettings, empty_folder: Path
) -> None:
    await run("coordinator", "init")
    settings = config.with_values(identity={"operator_address": "0.0.0.0:0"})
    async with served_in(Path(), settings) as client:
        assert client.bound.operator_address is not None
        assert "no open invites" in (await run("coordinator", "invites")).stdout
        found = read_identity(Path("wattfleet-identity/operator"))
        assert found is not None and found.coordinator == client.bound.operator_address.replace("0.0.0.0", "127.0.0.1")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CONFIG", "coordinator.toml", "127.0.0.1:7471, as coordinator.toml says:"),
        ("SERVER_ADDRESS", "127.0.0.1:7472", "127.0.0.1:7472, as WATTFLEET_COORDINATOR_SERVER_ADDRESS says:"),
        ("SERVER_ADDRESS", "127.0.0.1:0", "127.0.0.1:7070, the default address:"),
        ("CONFIG", "absent.toml", "127.0.0.1:7070, the default address:"),
    ],
)
def test_a_configured_coordinator_is_asked_where_its_settings_say(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    Path("coordinator.toml").write_text('[server]\naddress = "0.0.0.0:7471"\n')
    monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}{variable}", value)
    assert f"no coordinator answers at {expected}" in asked()


def test_an_error_says_who_named_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTFLEET_COORDINATOR", "127.0.0.1:1")
    assert "at 127.0.0.1:1, as WATTFLEET_COORDINATOR says:" in asked()
    monkeypatch.delenv("WATTFLEET_COORDINATOR")
    (tmp_path / "config.toml").write_text('[connection]\ncoordinator = "127.0.0.1:2"\n')
    monkeypatch.setenv("WATTFLEET_CONFIG", str(tmp_path / "config.toml"))
    assert "at 127.0.0.1:2, as your settings file says:" in asked()


def test_a_damaged_note_of_an_address_is_ignored() -> None:
    Path("wattfleet-coordinator.db.lock").write_bytes(b"\xff\x00nonsense")
    assert "at 127.0.0.1:7070, the default address:" in asked()
