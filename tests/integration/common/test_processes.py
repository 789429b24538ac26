"""Processes: system programs, children, the `wattfleet` command as installed, and each shell's completions."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from wattfleet.common.programs import run_no_program, run_program

# --- Programs ---------------------------------------------------------------------------------------------------------
# Running system programs such as nvpmodel.


def test_a_program_is_answered_and_all_that_it_says_is_heard():
    asks = "import sys; print('reboot?'); print(input(), file=sys.stderr, flush=True); sys.exit(3)"
    result = run_program([sys.executable, "-c", asks], "no\n")
    assert result.code == 3
    assert sorted(result.output.split()) == ["no", "reboot?"]


def test_a_program_that_is_not_there_has_no_exit_status():
    result = run_program(["nvpmodel-that-is-not-installed", "-q"], "")
    assert (result.code, result.output) == (None, "No such file or directory")


def test_for_another_machines_files_no_program_is_run():
    assert run_no_program(["systemctl", "stop", "nvfancontrol"], "").code is None


# --- Child process ----------------------------------------------------------------------------------------------------
# Child processes end when their parent is killed.

_REQUEST = pickle.dumps(list(range(10_000)))
_ECHO = """
from wattfleet.common.child_process import parent_connection
with parent_connection() as parent:
    for request in parent.requests():
        parent.answer(request)
"""


def ended(command: list[str], sent: bytes, reads_answers: bool) -> tuple[int, bytes]:
    """The exit status and the error output of a child whose parent ends after sending something."""
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        if not reads_answers:
            child.stdout.close()
        child.stdin.write(sent)
        child.stdin.close()
        return child.wait(60), child.stderr.read()


@pytest.mark.parametrize("sent", [b"", _REQUEST[:5000]], ids=["before a request", "in a request"])
def test_a_fitting_process_whose_agent_was_killed_ends_in_silence(sent: bytes) -> None:
    assert ended(["-m", "edge_agent.learning.fitting_process"], sent, reads_answers=True) == (0, b"")


def test_a_child_whose_parent_was_killed_before_the_answer_ends_in_silence() -> None:
    assert ended(["-c", _ECHO], _REQUEST, reads_answers=False) == (0, b"")


# --- Installed command ------------------------------------------------------------------------------------------------
# The `wattfleet` command in a process of its own, as installed and without some dependencies.

needs_coordinator = pytest.mark.skipif(
    find_spec("prometheus_client") is None, reason="the extra `coordinator` is not installed"
)


@needs_coordinator
def test_the_installed_command_ends_with_2_and_one_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [Path(sys.executable).with_name("wattfleet"), "coordinator", "serve", "--site-budget-w=9", "--policy=luck"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == "wattfleet: unknown policy 'luck': choose one of fastest-k, all, random, deadline, tiers, oort, fair,"
        " progress\n"
    )
    assert not list(tmp_path.iterdir()), "nothing was started"


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        pytest.param("coordinator serve --site-budget-w 50", "sqlalchemy", "coordinator", marks=needs_coordinator),
        pytest.param("coordinator devices", "grpc", "coordinator", marks=needs_coordinator),
        ("agent run --device simulated:orin-nx --device-id a --minibatches-per-epoch 9", "grpc", "agent"),
        ("simulate --rounds 1", "grpc", "simulation"),
    ],
)
def test_a_missing_dependency_is_named_with_how_to_install_it(
    tmp_path: Path, arguments: str, module: str, extra: str
) -> None:
    without = f"import sys; sys.modules[{module!r}] = None; from wattfleet.common.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", without, *arguments.split()], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert ended.stderr == f"Error: {arguments.split()[0]} needs {module}: pip install 'wattfleet[{extra}]'\n"


def test_the_list_of_commands_loads_no_large_library(tmp_path: Path) -> None:
    large = ("flwr", "pandas", "plotly", "scipy", "sklearn", "sqlalchemy", "torch")
    code = (
        "import atexit, sys; from wattfleet.common.cli import main;"
        f"atexit.register(lambda: print('loaded:', *(set({large}) & set(sys.modules)), file=sys.stderr)); main()"
    )
    shown = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert (shown.returncode, shown.stderr.split()) == (0, ["loaded:"])


# --- Completion -------------------------------------------------------------------------------------------------------
# The completions of each shell, as returned by the shell itself.

BASH = """
source "$1"
COMP_WORDS=({words}) COMP_CWORD={last}
_wattfleet_completion wattfleet
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

# compdef, _describe and compadd belong to the line editor; these functions print their arguments.
ZSH = """
compdef() {{ :; }}
_describe() {{ local array="$3"; print -l -- "${{(@P)array}}"; }}
compadd() {{ print -l -- "${{(@P)@[-1]}}"; }}
source "$1"
words=({words}) CURRENT={next}
_wattfleet_completion
"""

FISH = """
source $argv[1]
complete -C "{line}"
"""


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


def completed(shell: str, folder: Path, *words: str) -> set[str]:
    """The words that a shell offers for the last word, without quotes and descriptions."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder)}
    script = folder / "script"
    source = subprocess.run(["wattfleet", "completion", shell], capture_output=True, check=True, env=environment)
    script.write_bytes(source.stdout)
    quoted = " ".join(f"'{word}'" for word in words)
    template = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    program = template.format(words=quoted, last=len(words) - 1, next=len(words), line=" ".join(words))
    arguments = ["-c", program, *([shell] if shell != "fish" else []), str(script)]
    done = subprocess.run([shell, *arguments], capture_output=True, text=True, check=True, env=environment, timeout=60)
    separator = ":" if shell == "zsh" else None
    return {line.split(separator)[0] for line in done.stdout.splitlines() if line.strip()}


@needs_coordinator
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["wattfleet", "coo"], {"coordinator"}),
        (["wattfleet", "coordinator", "dev"], {"devices", "device"}),
        (["wattfleet", "coordinator", "budget", "s"], {"show", "set"}),
        (["wattfleet", "coordinator", "devices", "--wa"], {"--watch"}),
        (["wattfleet", "coordinator", "devices", "--state", "de"], {"degraded"}),
        (["wattfleet", "coordinator", "serve", "--log-format", "j"], {"json"}),
        (["wattfleet", "completion", "f"], {"fish"}),
    ],
)
def test_commands_options_and_values_are_completed(
    shell: str, words: list[str], offered: set[str], tmp_path: Path
) -> None:
    assert completed(shell, tmp_path, *words) == offered
