"""The `wattfleet` command run as from a shell: its output and exit codes."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner, Result

from wattfleet.errors import CorruptReferenceError, InfeasibleBudgetError, InvalidInputError, WattfleetError
from wattfleet_io import cli

needs_coordinator = pytest.mark.skipif(
    find_spec("prometheus_client") is None, reason="the extra `coordinator` is not installed"
)
GROUPS = [
    "advise",
    "agent",
    "completion",
    "coordinator",
    "evaluate",
    "flower",
    "join",
    "reference",
    "simulate",
    "version",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.wattfleet, list(arguments), prog_name="wattfleet")


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the whole command, including errors."""
    monkeypatch.setattr(sys, "argv", ["wattfleet", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_help_lists_the_groups_with_what_they_do() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    rows = shown.stdout.partition("Commands:\n")[2].splitlines()
    listed = [row.split(maxsplit=1) for row in rows if row[2] != " "]  # the others continue the text above
    assert [name for name, _ in listed] == GROUPS
    assert all("needs" not in text for _, text in listed), "all of them are installed here"


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_help(group: str) -> None:
    shown = run(group, "--help")
    assert shown.exit_code == 0
    assert f"wattfleet {group}" in shown.stdout


@pytest.mark.parametrize("words", [("join",), ("agent", "join")], ids=" ".join)
def test_the_usage_of_a_command_without_arguments_names_none(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.wattfleet, [*words, "--help"], prog_name="wattfleet")
    assert f"Usage: wattfleet {' '.join(words)} [OPTIONS]\n" in result.output and "[]" not in result.output


def test_the_version_is_the_installed_one() -> None:
    assert run("--version").stdout.startswith("wattfleet, version 0.")


def test_version_names_what_matters_when_two_machines_do_not_get_along() -> None:
    found = json.loads(run("version", "--json").stdout)
    assert list(found) == ["wattfleet", "protocol", "python", "flwr", "torch"]
    assert found["wattfleet"].startswith("0.") and found["python"].startswith("3.")
    assert [line.split()[0] for line in run("version").stdout.splitlines()] == list(found)


def test_version_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torch":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("wattfleet_io.version.version", version)
    assert run("version").stdout.splitlines()[-1].split() == ["torch", "not", "installed"]


@needs_coordinator
def test_an_argument_that_is_no_utf_8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "coordinator", "device", "orin\udcff", "--coordinator", "127.0.0.1:1") == 2
    assert capsys.readouterr().err == "wattfleet: b'orin\\xff' is not valid UTF-8: pass it in UTF-8\n"


def test_an_unknown_command_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "fly") == 2
    assert "No such command 'fly'" in capsys.readouterr().err


class AgentStoppedError(WattfleetError):
    """An error during operation that no argument caused."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("no such board"), 2),
        (InfeasibleBudgetError("5 W carry none"), 2),
        (CorruptReferenceError("digest differs"), 2),
        (AgentStoppedError("the agent went away"), 1),
    ],
)
def test_errors_end_with_their_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: WattfleetError, code: int
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(cli.InstalledCommands, "invoke", lambda _, ctx: fail(ctx))
    assert main(monkeypatch, "simulate") == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"wattfleet: {error}\n")


def test_an_error_that_quotes_a_whole_file_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.csv"
    corpus.write_text(f"cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n{'[' * 200_000},1,1,1,1,1\n")
    assert main(monkeypatch, "agent", "modes", "--device", f"replay:{corpus}") == 2
    error = capsys.readouterr().err
    assert "corpus.csv, line 2: cores is [[[" in error
    assert len(error) < 10_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(["coordinator", "serve", "--site-budget-w", *arguments], named, marks=needs_coordinator)
        for arguments, named in (
            (["50", "--policy", "luck"], "unknown policy 'luck': choose one of fastest-k, all, "),
            (["50", "--reference", "/nowhere"], "/nowhere: no such directory"),
            (["-1"], "a budget must be finite and above 0 W"),
            (["50", "--address", "7070"], "'7070' is not an address"),
        )
    ]
    + [
        pytest.param(["coordinator", *arguments], named, marks=needs_coordinator)
        for arguments, named in (
            (["devices", "--coordinator", "7070"], "'7070' is not an address"),
            (["budget", "set", "site", "5", "--for", "ever"], "'ever' is not a duration"),
            (["reference", "publish", "/nowhere"], "/nowhere: no such directory"),
            (["plan"], "pass --dry-run"),
        )
    ]
    + [
        (
            ["agent", "run", "--device-id", "a", "--minibatches-per-epoch", "9", "--device", "simulated:tx2"],
            "unknown device 'simulated:tx2'; choose one of auto, sysfs,",
        ),
    ],
)
def test_bad_input_of_every_group_ends_with_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("wattfleet: ") and shown.err.count("\n") == 1
    assert named in shown.err


@needs_coordinator
def test_a_coordinator_that_is_away_ends_with_1_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "coordinator", "devices", "--coordinator", "127.0.0.1:1") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("wattfleet: no coordinator answers at 127.0.0.1:1: ") and shown.err.count("\n") == 1


# --- a Jetson does not install the coordinator's dependencies -----------------------------------------------------


class UninstalledGroup:
    """An entry point whose package is not installed."""

    name = "simulate"

    def load(self) -> typer.Typer:
        raise ModuleNotFoundError("No module named 'wattfleet_simulation'", name="wattfleet_simulation")


def test_help_works_beside_a_group_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [UninstalledGroup()])
    shown = run("--help")
    assert shown.exit_code == 0
    assert "pip install 'wattfleet[simulation]'" in shown.stdout
    called = run("simulate", "--rounds", "3")
    assert called.exit_code == 1
    assert called.stderr == "Error: simulate needs wattfleet_simulation: pip install 'wattfleet[simulation]'\n"
