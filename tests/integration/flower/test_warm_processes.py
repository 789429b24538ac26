"""Processes for messages that a fork server starts, compared with the same program started alone."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.polling import until
from tests.fakes.short_forms import first
from wattfleet.flower.logged_program import flower_script
from wattfleet.flower.supernode import launching
from wattfleet.flower.supernode.launching import CLIENT_APP, ForkServer, Launcher

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork servers need Linux"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower for Python 3.10 starts cold"),
]

# Stands in for Flower's program of a ClientApp: it reports its environment, and follows instructions.
PROGRAM = """
import json, os, random, signal, subprocess, sys
started_with = sorted(sys.modules)
sys.path.insert(0, os.environ["APP_FOLDER"])
import app_module
from flwr.clientapp import ClientApp
import numpy
if __name__ == "__main__":
    app_module.calls += 1
    for name in sys.argv[2].split(",") if sys.argv[2] else []:
        __import__(name)
    found = {
        "pid": os.getpid(), "argv": sys.argv, "path": sys.path[1:], "cwd": os.getcwd(), "environment": dict(os.environ),
        "session": os.getsid(0), "group": os.getpgid(0), "umask": os.umask(0o22), "calls": app_module.calls,
        "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]),
        "interrupt": str(signal.getsignal(signal.SIGINT)), "modules": started_with,
        "random": [random.random(), float(numpy.random.random())], "hook": str(sys.excepthook), "main": __file__,
    }
    with open(sys.argv[1] + "~", "w") as file:
        json.dump(found, file)
    os.rename(sys.argv[1] + "~", sys.argv[1])
    exec(sys.argv[3])
"""
THREADY = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
CONNECTING = "import socket\nkept = socket.socket()\n"
WITH_A_DEVICE = "kept = open('/dev/full')\n"
STARTING = "import subprocess\nkept = subprocess.Popen(['sleep', '600'])\n"


class Messages:
    """Starts the program for one message after the other."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder = folder
        self.environment = dict(os.environ)
        self._script = script
        self._count = 0

    def run(self, launcher: Launcher, imports: str = "", then: str = "") -> dict[str, Any]:
        """What the program reports when it is started for a message."""
        return self._found(lambda arguments: launcher([CLIENT_APP, *arguments]), imports, then)

    def run_alone(self) -> dict[str, Any]:
        """What the program reports when it is started alone."""
        return self._found(
            lambda arguments: subprocess.run([self._script, *arguments], env=self.environment, check=True), "", ""
        )

    def _found(self, start: Any, imports: str, then: str) -> dict[str, Any]:
        self._count += 1
        answer = self.folder / f"answer-{self._count}"
        start([str(answer), imports, then])
        until(answer.exists)
        found: dict[str, Any] = json.loads(answer.read_text())
        found["argv"][1] = "answer"
        return found


@pytest.fixture
def messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Messages:
    return messages_in(tmp_path, monkeypatch)


def messages_in(folder: Path, patch: pytest.MonkeyPatch) -> Messages:
    app, programs, working = folder / "app", folder / "bin", folder / "working"
    for each in (app, programs, working):
        each.mkdir()
    (app / "app_module.py").write_text("from flwr.clientapp import ClientApp\ncalls = 0\napp = ClientApp()\n")
    (working / "statistics_of_mine.py").write_text("")
    script = programs / CLIENT_APP
    script.write_text(f"#!{sys.executable}\n{PROGRAM}")
    script.chmod(0o755)
    patch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    patch.setenv("APP_FOLDER", str(app))
    patch.chdir(working)
    return Messages(folder, script)


@pytest.fixture
def launcher(messages: Messages) -> Iterator[Launcher]:
    yield from started(messages)


def started(messages: Messages, **options: Any) -> Iterator[Launcher]:
    servers = messages.folder / "servers"
    servers.mkdir()
    launcher = Launcher(servers, messages.environment, **options)
    try:
        yield launcher
    finally:
        launcher.close()
        until(lambda: launcher.reap() == 0)


def fork_servers() -> list[psutil.Process]:
    """The running fork servers that this process has started."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and any("fork_server" in part for part in child.cmdline())
    ]


def warm(
    messages: Messages, launcher: Launcher, module: str = "flwr.supernode.runtime.run_clientapp"
) -> dict[str, Any]:
    """What the first program reports that was started with a module already imported."""
    for _ in range(50):
        until(lambda: not launcher.prepare())
        found = messages.run(launcher)
        if module in found["modules"]:
            return found
    raise AssertionError(f"{module} was never imported ahead")


class TestOneLauncher:
    """Messages one after the other, whose processes one launcher starts."""

    @pytest.fixture(scope="class")
    @classmethod
    def messages(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Messages]:
        with pytest.MonkeyPatch.context() as patch:
            yield messages_in(tmp_path_factory.mktemp("messages"), patch)

    @pytest.fixture(scope="class")
    @classmethod
    def launcher(cls, messages: Messages) -> Iterator[Launcher]:
        yield from started(messages)

    def test_a_warm_process_finds_what_flowers_own_process_finds(self, messages: Messages, launcher: Launcher) -> None:
        found, alone = warm(messages, launcher), messages.run_alone()
        for differing in ("pid", "modules", "random"):
            del found[differing], alone[differing]
        assert found == alone
        assert not [file for file in found["files"] if file.startswith("socket:")]

    def test_every_message_has_a_process_and_modules_of_its_own(self, messages: Messages, launcher: Launcher) -> None:
        found = warm(messages, launcher)
        second = messages.run(launcher)
        assert found["pid"] != second["pid"]
        assert (found["calls"], second["calls"]) == (1, 1)
        assert "app_module" not in second["modules"]
        assert set(found["random"]).isdisjoint(second["random"]), "random numbers are drawn anew"

    def test_a_message_that_kills_its_process_leaves_nothing_behind(
        self, messages: Messages, launcher: Launcher
    ) -> None:
        warm(messages, launcher)
        messages.run(launcher, then="os.kill(os.getpid(), signal.SIGKILL)")
        assert "flwr.supernode.runtime.run_clientapp" in messages.run(launcher)["modules"]
        until(lambda: not any(server.children() for server in fork_servers()))

    def test_what_an_app_started_outlives_its_process_as_in_flower(
        self, messages: Messages, launcher: Launcher
    ) -> None:
        warm(messages, launcher)
        left = messages.folder / "left"
        found = messages.run(
            launcher, then=f"open({str(left)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
        )
        until(lambda: left.exists() and left.read_text() and not psutil.pid_exists(found["pid"]))
        grandchild = psutil.Process(int(left.read_text()))
        assert grandchild.is_running()
        grandchild.kill()

    def test_what_a_message_imported_is_imported_ahead_without_waiting_for_the_next(
        self, messages: Messages, launcher: Launcher
    ) -> None:
        def is_imported_ahead(module: str) -> bool:
            return any(module in file.read_text() for file in (messages.folder / "servers").glob("*/imports.json"))

        warm(messages, launcher)
        messages.run(launcher, imports="wave")
        assert not is_imported_ahead("wave")
        with launcher.preparing():
            until(lambda: is_imported_ahead("wave"))


def test_a_killed_server_is_replaced_by_flowers_own_start(
    messages: Messages, launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    warm(messages, launcher)
    for server in fork_servers():
        server.kill()
    for _ in range(2):
        assert "flwr.supernode.runtime.run_clientapp" not in messages.run(launcher)["modules"]
    [warning] = [each for each in caplog.messages if each.startswith("Each message starts a new process")]
    assert "the fork server has ended" in warning and "Restart the SuperNode" in warning


def test_a_server_that_hangs_starts_nothing_later(
    messages: Messages, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm(messages, launcher)
    monkeypatch.setattr(launching, "_ACKNOWLEDGED_WITHIN_S", 0.1)
    for server in fork_servers():
        server.send_signal(signal.SIGSTOP)
    found = messages.run(launcher)
    assert "flwr.supernode.runtime.run_clientapp" not in found["modules"], "started as Flower does"
    for server in fork_servers():  # a replaced fork server should end by itself
        server.send_signal(signal.SIGCONT)
    until(lambda: not fork_servers())


def test_libraries_of_the_app_are_imported_ahead_but_not_its_own(messages: Messages, launcher: Launcher) -> None:
    assert "wave" not in warm(messages, launcher)["modules"]
    messages.run(launcher, imports="wave")
    assert "app_module" not in warm(messages, launcher, "wave")["modules"]


def test_nothing_is_learned_if_only_some_modules_are_wanted(messages: Messages, tmp_path: Path) -> None:
    for launcher in started(messages, learn=False, imports=["chunk"]):
        warm(messages, launcher, "chunk")
        messages.run(launcher, imports="wave")
        assert len({server.pid for _ in range(5) for server in fork_servers() if messages.run(launcher)}) == 1


@pytest.mark.parametrize("text", first(1, [THREADY, CONNECTING, WITH_A_DEVICE, STARTING]))
def test_an_import_that_cannot_be_forked_is_left_out(
    messages: Messages, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "unfit_library.py").write_text(text)
    (libraries / "broken_library.py").write_text("raise RuntimeError('no display')\n")
    environment = messages.environment
    environment["PYTHONPATH"] = os.pathsep.join([str(libraries), environment.get("PYTHONPATH", "")])
    for launcher in started(messages, imports=["broken_library", "unfit_library", "wave"]):
        assert "unfit_library" not in warm(messages, launcher, "wave")["modules"]
    [told] = [record.getMessage() for record in caplog.records if "unfit_library" in record.getMessage()]
    assert re.search(r"Messages wait longer .*importing unfit_library (starts|opens) .* took \d+\.\d s here", told)


def test_threads_of_openblas_are_no_obstacle(messages: Messages) -> None:
    messages.environment.pop("OMP_NUM_THREADS", None)
    messages.environment["OPENBLAS_NUM_THREADS"] = "2"
    for launcher in started(messages):
        warm(messages, launcher)


def test_without_flowers_program_for_this_python_there_is_no_server(
    messages: Messages, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "bin" / CLIENT_APP
    script.write_text(script.read_text().replace(f"#!{sys.executable}", "#!/usr/bin/env python3"))
    for _ in started(messages):
        assert not fork_servers()
    assert "is not installed for" in caplog.text


def test_a_server_ends_with_the_process_that_started_it(messages: Messages, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    script = flower_script(CLIENT_APP)
    assert script is not None
    server = ForkServer(script, [], folder, os.environ)
    assert server.is_ready(within_s=60)
    server.close()
    assert server.process.wait(timeout=60) == 0
