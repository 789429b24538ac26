"""A signal ends the coordinator within its time limit, whichever part hangs."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes.coordinator_process import CoordinatorProcess
from tests.fakes.polling import until

_LIMIT_S = 1

# The real command, with a part that hangs for an hour.
_HANGING = """
import asyncio, socket, sys, threading, time

def hang(*_, **__):
    print("it hangs", flush=True)
    time.sleep(3600)

if hangs == "names":
    look_up = socket.getaddrinfo
    def sometimes(host, *rest, **more):
        return (hang if host.endswith(".example") else look_up)(host, *rest, **more)
    socket.getaddrinfo = sometimes
elif hangs == "a thread":
    import coordinator.server as services
    healthy = services.HealthServicer
    def with_thread():
        asyncio.get_running_loop().run_in_executor(None, hang)
        return healthy()
    services.HealthServicer = with_thread
elif hangs == "the store":
    import coordinator.store.store as store
    store.Store.require_owner = hang
elif hangs == "a task":
    import coordinator.services.orders as trimmer
    async def watch(self):
        print("it hangs", flush=True)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    trimmer.Trimmer.watch = watch
elif hangs == "the log":
    import coordinator.services.orders as trimmer
    async def watch(self):
        while True:
            await asyncio.sleep(0)
            print("x" * 1_000, file=sys.stderr, flush=True)
    trimmer.Trimmer.watch = watch
from wattfleet_io.cli import main
main()
"""


def hanging(tmp_path: Path, hangs: str, stderr: int | None = None) -> CoordinatorProcess:
    """A coordinator with a part that hangs."""
    (tmp_path / "site.toml").write_text(
        '[supplies.site]\nbudget = { query = "watts", url = "http://prometheus.example:9090", fallback_w = 60 }\n'
    )
    (tmp_path / "settings.toml").write_text(
        f"[server]\nstop_grace_s = 0.1\nstop_limit_s = {_LIMIT_S}\n"
        "[site]\nquery_timeout_s = 0.2\n[store]\nowner_check_s = 0.01\n"
    )
    options = ("--config", str(tmp_path / "settings.toml"), "--site-file", str(tmp_path / "site.toml"))
    code = f"hangs = {hangs!r}\n{_HANGING}"
    return CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *options, code=code, stderr=stderr)


@pytest.mark.parametrize("hangs", ["names", "a thread", "the store", "a task"])
def test_sigterm_ends_a_coordinator_of_which_something_hangs(tmp_path: Path, hangs: str) -> None:
    coordinator = hanging(tmp_path, hangs)
    coordinator.begin()
    try:
        until(lambda: coordinator.serves and "it hangs" in coordinator.log.read_text())
    finally:
        status = coordinator.stop()
    said = coordinator.log.read_text()
    assert "Traceback" not in said
    if hangs == "names":
        assert status == 0, said
    else:
        assert status == 1, said
        assert f"did not stop within {_LIMIT_S} s and is terminated now" in said


def test_sigterm_ends_a_coordinator_whose_log_nobody_reads(tmp_path: Path) -> None:
    coordinator = hanging(tmp_path, "the log", subprocess.PIPE)
    coordinator.begin()
    try:
        until(lambda: coordinator.serves)
        time.sleep(0.5)  # the pipe fills within milliseconds
        assert coordinator.serves
    finally:
        status = coordinator.stop()
    assert status == 1


async def test_a_closed_terminal_ends_it_and_a_signal_that_was_ignored_does_not(tmp_path: Path) -> None:
    in_the_background = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    coordinator = CoordinatorProcess(
        tmp_path, tmp_path / "coordinator.db", "--site-budget-w", "60", wrapper=in_the_background
    )
    await coordinator.start()
    try:
        coordinator.send(signal.SIGINT)
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(2):  # the first may be answered before the signal arrives
                await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert coordinator.serves
    finally:
        status = coordinator.stop(signal.SIGHUP)
    assert status == 0, coordinator.log.read_text()
