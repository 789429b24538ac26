"""An operator's commands work where only `pip install wattfleet` was run: they need no package of the coordinator."""

from __future__ import annotations

import asyncio
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from coordinator.cli.commands import app
from coordinator.settings import CoordinatorSettings
from tests.fakes import base_installation
from tests.fakes.certified import CertifiedFleet, certified
from tests.fakes.served import serving
from tests.fakes.shell import a_round
from tests.fakes.small_fleet import RUN
from wattfleet.prediction import Artefact, write_artefact
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.peers import Role
from wattfleet_io.cli import installation_of

IN_PLAINTEXT = [
    *("devices", "device orin", "nodes", "workloads", "runs", "rounds", f"round {RUN} 1", "plan --dry-run"),
    *(
        "events --kind device",
        "plan --dry-run --budget site=50 --policy random --clients 1",
        "profile --workload lenet --devices nano",
    ),
    *("tag nano --add lab", "drain nano", "drain nano --undo", "export --out OUT"),
    *("budget show", "budget set site 90", "budget clear site"),
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
    assert failed == {}
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
