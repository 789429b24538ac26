"""The completions of each shell, as returned by the shell itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the extra `coordinator` is not installed")

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
