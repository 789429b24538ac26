"""The `wattfleet` command run as from a shell: its output, exit codes and help."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import typer
from click.testing import CliRunner, Result

from wattfleet.common import cli
from wattfleet.common.help import settable_options
from wattfleet.core.errors import CorruptReferenceError, InfeasibleBudgetError, InvalidInputError, WattfleetError

# --- CLI --------------------------------------------------------------------------------------------------------------
# The `wattfleet` command run as from a shell: its output and exit codes.


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

    monkeypatch.setattr("wattfleet.common.version.version", version)
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
        raise ModuleNotFoundError("No module named 'wattfleet.simulation'", name="wattfleet.simulation")


def test_help_works_beside_a_group_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [UninstalledGroup()])
    shown = run("--help")
    assert shown.exit_code == 0
    assert "pip install 'wattfleet[simulation]'" in shown.stdout
    called = run("simulate", "--rounds", "3")
    assert called.exit_code == 1
    assert called.stderr == "Error: simulate needs wattfleet.simulation: pip install 'wattfleet[simulation]'\n"


# --- Help -------------------------------------------------------------------------------------------------------------
# The help of every command, in narrow and in wide terminals.

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="the extra `simulation` is not installed")

_LONGEST_OF_SERVE = 115
_SHELLS = "completion"
"""Its help has commands to copy, which must not be wrapped."""


def every_command(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, click.Context]]:
    """All commands with their words, such as `coordinator devices`."""
    yield ctx.command_path.partition(" ")[2], ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            assert child is not None
            inner = child.context_class(child, info_name=name, parent=ctx, resilient_parsing=True)
            yield from every_command(child, inner)


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Context]:
    root = cli.wattfleet
    return dict(every_command(root, root.context_class(root, info_name="wattfleet", resilient_parsing=True)))


@needs_torch
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_help_is_cut(commands: dict[str, click.Context], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert len(commands) > 60
    for words, ctx in commands.items():
        text = ctx.get_help()
        too_long = [line for line in text.split("\n") if len(line) > columns]
        assert words == _SHELLS or not too_long, f"{words}: {too_long}"
        assert "…" not in text, words
        shown = text.split()
        for option in ctx.command.get_params(ctx):
            if isinstance(option, click.Option) and not option.hidden:
                assert set(option.opts) & set(shown), f"{words}: {option.opts} is not in the help"


@needs_torch
def test_the_last_lines_of_a_help_name_the_variables_and_nothing_else_does(commands: dict[str, click.Context]) -> None:
    for words, ctx in commands.items():
        text = " ".join(ctx.get_help().split())
        assert "env var" not in text, words
        variables = [str(each.envvar) for each in settable_options(ctx.command.get_params(ctx)) if each.envvar]
        named = text.partition("Variables: ")[2].rstrip(".")
        found: list[str] = []
        for part in filter(None, named.replace(";", ",").split(", ")):
            complete = part.strip()
            prefix = getattr(ctx.command, "prefix", f"{ctx.command_path.upper().replace(' ', '_').replace('-', '_')}_")
            found.append(complete if complete.startswith("WATTFLEET") else prefix + complete[1:])
        assert sorted(found) == sorted(variables), words


@needs_torch
def test_no_option_states_its_default_twice(commands: dict[str, click.Context]) -> None:
    for words, ctx in commands.items():
        for parameter in ctx.command.get_params(ctx):
            _, text = parameter.get_help_record(ctx) or ("", "")
            assert not ("efault" in text.partition("[")[0] and "[default:" in text), f"{words}: {text}"


@needs_torch
def test_the_help_of_serve_can_be_read(commands: dict[str, click.Context], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = commands["coordinator serve"].get_help()
    assert len(text.split("\n")) <= _LONGEST_OF_SERVE
    assert text.index("Addresses:") < text.index("--address") < text.index("Site:") < text.index("--site-budget-w")


@needs_torch
def test_the_commands_of_the_coordinator_are_in_panels(commands: dict[str, click.Context]) -> None:
    text = commands["coordinator"].get_help()
    panels = [text.index(f"\n{name}:\n") for name in ("This machine", "Fleet", "Runs", "Identities")]
    assert panels == sorted(panels)
    assert panels[1] < text.index("\n  devices ") < panels[2] < text.index("\n  rounds ") < panels[3]
