"""Runs the system's programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        code: its exit status; None if the program does not exist or did not end in time.
        output: its standard output and standard error.
    """

    code: int | None
    output: str


RunProgram = Callable[[Sequence[str], str], ProgramResult]
"""Runs a command line with a text as its input."""


def run_program(command: Sequence[str], answer: str) -> ProgramResult:
    """Run a program of this machine to its end.

    Args:
        command: the program and its arguments.
        answer: text for its standard input.
    """
    try:
        ended = subprocess.run(
            command,
            input=answer,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            # English, since the output is searched for words.
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return ProgramResult(None, f"it did not end within {_TIMEOUT_S:g} s")
    except OSError as error:
        return ProgramResult(None, error.strerror or str(error))
    return ProgramResult(ended.returncode, ended.stdout)


def run_no_program(command: Sequence[str], answer: str) -> ProgramResult:
    """Refuse to run a program; used with another machine's files, which this machine's programs cannot change."""
    return ProgramResult(None, f"{command[0]} is not run, since the files are another machine's")
