"""Faults created by the kernel, with `tc` in a network namespace of the test's own. Nothing outside it is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

_UNSHARED = ("unshare", "--net", "--map-root-user")
_ROOT = Path(__file__).parents[2]


def _require(discipline: str) -> None:
    """Skip the test if this kernel, or this user, cannot use a queueing discipline."""
    if missing := [program for program in ("unshare", "ip", "tc") if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    tried = subprocess.run(
        [*_UNSHARED, "tc", "qdisc", "add", "dev", "lo", "root", *discipline.split()], capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"tc cannot use {discipline.split()[0]} here: {tried.stderr.strip()}")


@pytest.mark.parametrize(
    "discipline", ["netem delay 250ms", "netem loss 50%", "tbf rate 512kbit burst 16kb latency 2s"]
)
def test_a_fleet_recovers_from_faults_of_the_kernel(discipline: str, tmp_path: Path) -> None:
    _require(discipline)
    command = [*_UNSHARED, sys.executable, "-m", "tests.faults.in_namespace", str(tmp_path / "fleet")]
    done = subprocess.run(
        [*command, *discipline.split()],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(f"\nkernel, {discipline}: {done.stdout.splitlines()[-1]}")
