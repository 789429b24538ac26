"""Runs a program of Flower, and the programs that it starts, with the chosen log: JSON in each line.

    python -P -m wattfleet_flower.logged_program PROGRAM OPTIONS

A program of Flower has a log of its own, which is text.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from wattfleet_flower import process_log
from wattfleet_io.logs import log_format

_EXECUTOR = "flwr.supercore.superexec.executor.subprocess_executor"
"""Flower's module that starts the programs of apps."""


def main() -> None:
    """Run the program that the first argument names."""
    process_log.start()
    start_logged(importlib.import_module(_EXECUTOR))
    script = flower_script(sys.argv[1])
    assert script is not None, "whoever starts this has made sure of it"
    # As in a process that was started from the script.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


def start_logged(module: Any) -> None:
    """Let a module of Flower start its programs with the chosen log, if that is not Flower's own."""
    if log_format() != "json":
        return

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(logged(command), **options)

    module.subprocess = changed_copy(subprocess, Popen=start)


def changed_copy(module: ModuleType, **changed: Any) -> SimpleNamespace:
    """A module with other values of some names, for one module of Flower that uses it; all others keep the original."""
    return SimpleNamespace(**{**vars(module), **changed})


def logged(command: Sequence[str]) -> list[str]:
    """The command that runs a program of Flower with the chosen log; the same command if there is nothing to change."""
    if log_format() != "json" or flower_script(command[0]) is None:
        return list(command)
    # Without -P, Python would import modules from the working folder, which Flower's programs do not. Python 3.10 lacks
    # it, but only Flower 1.41 comes here, which needs a newer one.
    return [sys.executable, "-P", "-m", "wattfleet_flower.logged_program", *command]


def flower_script(name: str) -> Path | None:
    """A program of Flower as it would be found, if it runs in this Python."""
    found = shutil.which(name)
    if found is None:
        return None
    # The interpreter is named in the first line, or in the second if its path is too long for the first.
    head = b"\n".join(Path(found).read_bytes()[:1024].split(b"\n")[:2])
    named = [Path(os.fsdecode(word)) for word in re.findall(rb"[^\s'\"#!]+", head)]
    return Path(found) if any(_is_this_python(path) for path in named) else None


def _is_this_python(path: Path) -> bool:
    """Whether a path is this environment's Python, by whichever of its names."""
    mine = Path(sys.executable)
    return path.parent == mine.parent and path.exists() and path.samefile(mine)


if __name__ == "__main__":
    main()
