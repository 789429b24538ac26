"""The `wattfleet` command in a process of its own, as installed and without some dependencies."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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
    without = f"import sys; sys.modules[{module!r}] = None; from wattfleet_io.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", without, *arguments.split()], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert ended.stderr == f"Error: {arguments.split()[0]} needs {module}: pip install 'wattfleet[{extra}]'\n"
