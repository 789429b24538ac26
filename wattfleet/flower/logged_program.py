"""Runs one of Flower's programs, and the programs that it starts, with a JSON log.

    python -P -m wattfleet.flower.logged_program PROGRAM OPTIONS

On their own, Flower's programs log text only.
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

from wattfleet.common.logs import log_format
from wattfleet.flower import process_log

_EXECUTOR = "flwr.supercore.superexec.executor.subprocess_executor"
"""Flower's module that starts an app's programs."""


def main() -> None:
    """Run the program that the first argument names."""
    process_log.start()
    start_logged(importlib.import_module(_EXECUTOR))
    script = flower_script(sys.argv[1])
    assert script is not None, "`logged` starts this module only for a script that exists"
    # As if the script had been started directly.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


def start_logged(module: Any) -> None:
    """Make a Flower module start its programs with a JSON log, if JSON is chosen."""
    if log_format() != "json":
        return

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(logged(command), **options)

    module.subprocess = changed_copy(subprocess, Popen=start)


def changed_copy(module: ModuleType, **changed: Any) -> SimpleNamespace:
    """Return a copy of a module with some names replaced, to patch one Flower module and leave the original alone."""
    return SimpleNamespace(**{**vars(module), **changed})


def logged(command: Sequence[str]) -> list[str]:
    """Return the command that runs a Flower program with a JSON log, or the command itself if JSON is not chosen."""
    if log_format() != "json" or flower_script(command[0]) is None:
        return list(command)
    # Without -P, Python would import modules from the working folder, which Flower's programs do not. Python 3.10 has
    # no -P, but this is reached only with Flower 1.41 or newer, which needs Python 3.11.
    return [sys.executable, "-P", "-m", "wattfleet.flower.logged_program", *command]


def flower_script(name: str) -> Path | None:
    """Return the path of a Flower program on PATH, if it runs in this Python environment; else None."""
    found = shutil.which(name)
    if found is None:
        return None
    # The interpreter is named in the first line, or in the second if its path is too long for the first.
    head = b"\n".join(Path(found).read_bytes()[:1024].split(b"\n")[:2])
    named = [Path(os.fsdecode(word)) for word in re.findall(rb"[^\s'\"#!]+", head)]
    return Path(found) if any(_is_this_python(path) for path in named) else None


def _is_this_python(path: Path) -> bool:
    """Whether a path is this environment's Python, under any of its names."""
    mine = Path(sys.executable)
    return path.parent == mine.parent and path.exists() and path.samefile(mine)


if __name__ == "__main__":
    main()
