"""Programs of the system that are asked to do something."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        code: its exit status; None where there is no such program, or it did not end in time.
        output: what it said on both its outputs.
    """

    code: int | None
    output: str


RunProgram = Callable[[Sequence[str], str], ProgramResult]
"""Runs a command line with some text as its input."""


def run_program(command: Sequence[str], answer: str) -> ProgramResult:
    """Run a program of this machine to its end.

    Args:
        command: the program and its arguments.
        answer: what it reads when it asks something.
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
            # What it says is searched for words, so it is to say them in English.
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return ProgramResult(None, f"it did not end within {_TIMEOUT_S:g} s")
    except OSError as error:
        return ProgramResult(None, error.strerror or str(error))
    return ProgramResult(ended.returncode, ended.stdout)
