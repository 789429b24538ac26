"""How the operator's commands reach a coordinator: which one, what they need, and what they say if none answers."""

from __future__ import annotations

import asyncio
import csv
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import click
import pytest
import typer
from click.testing import CliRunner, Result

from coordinator.cli import options
from coordinator.cli.commands import app
from coordinator.settings import CoordinatorSettings
from coordinator.systemd.installation import SETTINGS_PATH, STATE_DIRECTORY
from tests.fakes import base_installation
from tests.fakes.served import CertifiedFleet, Client, a_round, certified, command, serving
from tests.fakes.small_fleet import RUN
from wattfleet.common import cli
from wattfleet.common.cli import installation_of
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.identity_folder import read_identity, write_identity
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.prediction import Artefact, write_artefact

# --- Coordinator of this machine --------------------------------------------------------------------------------------
# Commands on the coordinator's own machine find where it serves, and their errors name the address and its origin.


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
    assert options.PREFIX == CoordinatorSettings.prefix
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
        monkeypatch.setenv(f"{options.PREFIX}CONFIG", str(file))
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
    monkeypatch.setenv(f"{options.PREFIX}{variable}", value)
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


# --- Commands away ----------------------------------------------------------------------------------------------------
# The operator's commands where no coordinator is reachable, and commands that watch one that goes away.

EVERY_COMMAND = [
    ["devices"],
    ["device", "orin"],
    ["rounds"],
    ["plan", "--dry-run"],
    ["budget", "show"],
    ["budget", "set", "site", "5"],
    ["budget", "clear", "site"],
    ["battery", "show"],
    ["battery", "set", "site", "50"],
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
    monkeypatch.setattr("wattfleet.common.identity.channels._TIMEOUT_S", 0.2)
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


# --- Base installation ------------------------------------------------------------------------------------------------
# An operator's commands work where only `pip install wattfleet` was run: they need no package of the coordinator.

IN_PLAINTEXT = [
    *("devices", "device orin", "nodes", "workloads", "runs", "rounds", f"round {RUN} 1", "forecast", "plan --dry-run"),
    *(
        "energy --by site,run,device",
        "events --kind device",
        "plan --dry-run --budget site=50 --policy random --clients 1",
        "profile --workload lenet --devices nano",
    ),
    *("tag nano --add lab", "drain nano", "drain nano --undo", "export --out OUT"),
    *("budget show", "budget set site 90", "budget clear site", "budget set site 5kWh --per day"),
    *("battery show", "battery set nano 50"),
    *("reference publish REFERENCE", "reference list", "reference pin DIGEST", "reference unpin"),
    *("reference remove DIGEST", f"delete {RUN} --end", "forget nano", "init --identity NEW --host localhost"),
]
WITH_AN_AUTHORITY = [
    *("devices", "invite --role viewer --name anna", "invite --role device", "invites", "cancel-invite none"),
    *("certificates", "certificate anna --role viewer --out ANNA", "revoke anna", "audit-log"),
    *("rotate-authority begin", "rotate-authority finish"),
    "browser-certificate ANNA.p12",
]
OF_THE_SERVER = {
    *("serve", "install", "uninstall", "store check", "store backup", "store restore", "store carry-over"),
    *("reference sign", "reference keys init", "reference keys rotate", "reference keys show"),
}
"""Commands that run or maintain a coordinator, or sign references with TUF."""


async def run_alone(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit codes and outputs of commands in a process that finds no package of an extra."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, base_installation.__file__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    out, err = await process.communicate(json.dumps(commands).encode())
    assert process.returncode == 0, err.decode()
    return [(code, text) for code, text in json.loads(out)]


def names_of(command: click.Command, path: str = "") -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield path.strip()
        return
    for name, each in command.commands.items():
        yield from names_of(each, f"{path} {name}")


def test_every_command_of_an_operator_is_tried() -> None:
    tried = {*IN_PLAINTEXT, *WITH_AN_AUTHORITY, *OF_THE_SERVER}
    for name in names_of(typer.main.get_command(app)):
        assert any(f"{each} ".startswith(f"{name} ") for each in tried), name


async def test_commands_need_no_extra(config: CoordinatorSettings, tmp_path: Path, another: Artefact) -> None:
    write_artefact(another, tmp_path / "reference")
    values = {
        "OUT": str(tmp_path / "tables"),
        "REFERENCE": str(tmp_path / "reference"),
        "DIGEST": another.digest,
        "NEW": str(tmp_path / "new"),
    }
    # The agents send no leases while the commands run.
    async with serving(config.with_values(sessions={"lease_s": 120.0})) as client:
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        address = client.bound.address
        commands = [
            ["coordinator", *(values.get(word, word) for word in line.split())]
            + ([] if line.startswith("init") else ["--coordinator", address])
            for line in IN_PLAINTEXT
        ]
        answers = dict(zip(IN_PLAINTEXT, await run_alone(commands), strict=True))
    failed = {line: output for line, (code, output) in answers.items() if code != 0}
    assert list(failed) == ["battery set nano 50"] and "'nano' has no battery" in failed["battery set nano 50"]
    assert "orin" in answers["devices"][1] and "1 of 2" in answers["rounds"][1]
    [row] = csv.DictReader((tmp_path / "tables" / "rounds.csv").read_text().splitlines())
    assert (row["round"], row["wall_s"], row["unplanned"]) == ("1", "41.5", "False")


async def test_commands_with_certificates_need_no_extra(config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(tmp_path / "operator", fleet.identity(Role.OPERATOR))
    async with serving(certified(config, fleet.authority.folder)) as served:
        address, identity = ["--coordinator", served.bound.address], ["--identity", str(tmp_path / "operator")]
        commands = [
            ["coordinator", *line.replace("ANNA", str(tmp_path / "anna")).split(), *identity]
            + ([] if line.startswith("browser-certificate") else address)
            for line in WITH_AN_AUTHORITY
        ]
        answers = dict(zip(WITH_AN_AUTHORITY, await run_alone(commands), strict=True))
    failed = {line: output for line, (code, output) in answers.items() if code != 0}
    assert list(failed) == ["cancel-invite none"] and "no invite 'none'" in failed["cancel-invite none"]
    assert "anna" in answers["invites"][1] and "Invite" in answers["audit-log"][1]


async def test_what_needs_more_names_the_extra() -> None:
    commands = {
        "coordinator serve --site-budget-w 50": "coordinator",
        "coordinator reference keys init --out keys": "coordinator",
        "coordinator store check --store coordinator.db": "coordinator",
        "coordinator export --out tables --format parquet": "parquet",
        "agent run --device simulated:orin-nx --device-id a": "agent",
        "flower connect": "flower",
        "simulate --rounds 1": "simulation",
        "evaluate report --out report --data .": "simulation",
    }
    answers = await run_alone([line.split() for line in commands])
    for (line, extra), (code, output) in zip(commands.items(), answers, strict=True):
        assert code in (1, 2) and f"pip install 'wattfleet[{extra}]'" in output, (line, output)
        assert len(output.strip().splitlines()) == 1, output


def test_every_extra_that_is_named_exists() -> None:
    project = base_installation.PROJECT
    choices = {
        "pip install wattfleet",
        *(f"pip install 'wattfleet[{each}]'" for each in project["optional-dependencies"]),
    }
    assert {installation_of(name) for name in project["entry-points"]["wattfleet.commands"]} <= choices
