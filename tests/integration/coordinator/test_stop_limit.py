"""SIGTERM ends the coordinator within its limit, whatever hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.polling import until

_LIMIT_S = 1
_GENEROUS_S = 60.0

# The real command, of which a part hangs for an hour.
_HANGING = """
import asyncio, socket, sys, threading, time

def hang(*_, **__):
    print("it hangs", flush=True)
    time.sleep(3600)

hangs = sys.argv.pop(1)
if hangs == "names":
    look_up = socket.getaddrinfo
    def sometimes(host, *rest, **more):
        return (hang if host.endswith(".example") else look_up)(host, *rest, **more)
    socket.getaddrinfo = sometimes
elif hangs == "a thread":
    import coordinator.rpc_services as services
    healthy = services.HealthServicer
    def with_thread():
        asyncio.get_running_loop().run_in_executor(None, hang)
        return healthy()
    services.HealthServicer = with_thread
elif hangs == "the store":
    import coordinator.store.store as store
    store.Store.require_owner = hang
elif hangs == "a task":
    import coordinator.services.trimmer as trimmer
    async def watch(self):
        print("it hangs", flush=True)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    trimmer.Trimmer.watch = watch
elif hangs == "the log":
    import coordinator.services.trimmer as trimmer
    async def watch(self):
        while True:
            await asyncio.sleep(0)
            print("x" * 1_000, file=sys.stderr, flush=True)
    trimmer.Trimmer.watch = watch
from wattfleet_io.cli import main
main()
"""


def serving(tmp_path: Path, hangs: str) -> list[str]:
    """The command of a coordinator of which a part hangs."""
    (tmp_path / "site.toml").write_text(
        '[supplies.site]\nbudget = { query = "watts", url = "http://prometheus.example:9090", fallback_w = 60 }\n'
    )
    (tmp_path / "settings.toml").write_text(
        f"[server]\nstop_grace_s = 0.1\nstop_limit_s = {_LIMIT_S}\n"
        "[site]\nquery_timeout_s = 0.2\n[store]\nowner_check_s = 0.01\n"
    )
    return [
        *(sys.executable, "-c", _HANGING, hangs, "coordinator", "serve"),
        *("--config", str(tmp_path / "settings.toml"), "--site-file", str(tmp_path / "site.toml")),
        *("--address", "127.0.0.1:0", "--metrics-address", "127.0.0.1:0"),
        *("--store", str(tmp_path / "coordinator.db"), "--announce", str(tmp_path / "addresses.json")),
    ]


@pytest.mark.parametrize("hangs", ["names", "a thread", "the store", "a task"])
def test_sigterm_ends_a_coordinator_of_which_something_hangs(tmp_path: Path, hangs: str) -> None:
    announced, log = tmp_path / "addresses.json", tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(serving(tmp_path, hangs), stdout=out, stderr=out)
        try:
            until(lambda: (announced.exists() and "it hangs" in log.read_text()) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            process.terminate()
            status = process.wait(_GENEROUS_S)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    assert "Traceback" not in said
    if hangs == "names":
        assert status == 0, said
    else:
        assert status == 1, said
        assert f"did not stop within {_LIMIT_S} s: it ends now" in said


def test_sigterm_ends_a_coordinator_whose_log_nobody_reads(tmp_path: Path) -> None:
    announced = tmp_path / "addresses.json"
    process = subprocess.Popen(
        serving(tmp_path, "the log"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0
    )
    try:
        until(lambda: announced.exists() or process.poll() is not None)
        time.sleep(0.5)  # the pipe fills within milliseconds
        assert process.poll() is None
        process.terminate()
        assert process.wait(_GENEROUS_S) == 1
    finally:
        process.kill()
        process.communicate()
