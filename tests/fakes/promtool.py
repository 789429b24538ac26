"""Prometheus' own checker, for tests that are skipped without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    """Run `promtool` on a text, if one is given; what it finds fault with fails the test."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian's package prometheus brings it)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, input=text, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
