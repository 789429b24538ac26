"""A module of this installation in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def python_process(module: str, *arguments: str, encoding: str | None = None) -> subprocess.Popen[Any]:
    """Start `python -m module` with pipes to its standard input and from its standard output.

    It is in a session of its own: a Ctrl-C is for the agent, which then ends it. `-m` imports from the current folder
    first: where root runs it in a user's, that user's `torch.py` must not run as root.

    Args:
        module: what to run.
        arguments: of its command line.
        encoding: of the pipes; None leaves them binary.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding=encoding,
        start_new_session=True,
        cwd="/",
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": _whole_paths(os.environ.get("PYTHONPATH", ""))},
    )


def _whole_paths(search_path: str) -> str:
    """The same folders for a process in another one; an empty entry, which is the current folder, is left out."""
    return os.pathsep.join(os.path.abspath(folder) for folder in search_path.split(os.pathsep) if folder)
