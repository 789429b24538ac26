"""Settings and fixtures that the tests of several packages share."""

from __future__ import annotations

import ast
import functools
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tests.fakes.short_forms import ALL_EXAMPLES, FEW_EXAMPLES
from wattfleet.common.logs import should_log
from wattfleet.common.settings.user_file import FILE_VARIABLE

pytest_plugins = ["tests.fixtures.edge_agent", "tests.fixtures.evaluation"]
if find_spec("sqlalchemy"):  # a Jetson has only the agent installed: `tests/agent_alone`
    pytest_plugins.append("tests.fixtures.coordinator")

# A busy machine is not a failure: no test asserts on elapsed time. `make test` tries the same examples each time, so
# that its result depends on the code alone. The slow form draws others each time.
settings.register_profile(
    "unhurried",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=FEW_EXAMPLES,
    derandomize=True,
)
settings.register_profile("slow", settings.get_profile("unhurried"), max_examples=ALL_EXAMPLES, derandomize=False)
settings.load_profile("unhurried")

# Nor is a client that disconnects at the end of a test, or a damaged answer; services log neither. Pytest would keep
# every such record until the end of the test, with all messages that its traceback refers to.
for _name in ("grpc._cython.cygrpc", "grpc._common"):
    logging.getLogger(_name).addFilter(should_log)


# Python before 3.11.8 may not parse in two threads at once (its issue 106905). Pytest parses to show a failure, and so
# does a thread that prints a traceback: if both did, the failure of one test would end the whole run.
if sys.version_info < (3, 11, 8):
    _parsing, _parse = threading.RLock(), ast.parse

    def _parse_alone(*args: Any, **kwargs: Any) -> ast.AST:
        with _parsing:
            return _parse(*args, **kwargs)

    ast.parse = _parse_alone  # type: ignore[assignment]


# A process has one command, and builds it once; the runner would build all of its options for every call.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]  # noqa: SLF001

# The commands under test must not see the settings of whoever runs the tests.
os.environ[FILE_VARIABLE] = ""
os.environ.pop("XDG_CONFIG_HOME", None)

# gRPC's own log goes to the terminal, past pytest. A refused handshake, for example, is what a test is about.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow forms too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        settings.load_profile("slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process waits for it at the end; leave out slow forms unless asked."""
    items.sort(key=lambda item: item.get_closest_marker("deployment") is None)
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude the collected tests and imported libraries from all later garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of measured corpora beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no measured corpora in {folder}")
    return folder


# --- Processes --------------------------------------------------------------------------------------------------------
# Folders and signals for processes that a test starts.


@pytest.fixture(scope="session", autouse=True)
def stop_signals() -> Iterator[None]:
    """Handle SIGINT and SIGHUP where they are ignored, as in `nohup make test &`, because tests send them.

    Whatever a process ignores, its children ignore, too. If it has a handler, its children begin with the default.
    SIGHUP is handled by doing nothing, so that the tests survive a closed terminal as `nohup` promises.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda number, frame: None}
    ignored = [number for number in handlers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, handlers[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """An empty folder with a short path, since pytest's own is too long for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:
        yield Path(folder)
