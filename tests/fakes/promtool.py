"""Prometheus's own checker, promtool; tests that use it are skipped if it is not installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    """Run `promtool` on a text, if one is given; fails the test if promtool reports an error."""
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (Debian's package prometheus brings it)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, input=text, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
