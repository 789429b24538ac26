"""The lines of a coordinator's log: whose they are, and that every one is an object with `--log-format json`."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.coordinator_process import CoordinatorProcess
from tests.fakes.polling import until
from wattfleet_io.addresses import split_address

JSON = ("--page-address", "127.0.0.1:0", "--log-format", "json")
OPTIONS = ("--site-budget-w", "50", *JSON)


class Meter(http.server.BaseHTTPRequestHandler):
    """Answers queries as Prometheus does."""

    asked = 0

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        Meter.asked += 1
        series = {"metric": {"__name__": "surplus_watts"}, "value": [time.time(), "80"]}
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": [series]}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def meter() -> Iterator[str]:
    """The URL of a Prometheus that knows `surplus_watts`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Meter) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_libraries_log_no_routine_and_their_warnings_are_objects(meter: str, tmp_path: Path) -> None:
    query = f'{{ query = "surplus_watts", url = "{meter}", every_s = 1, max_age_s = 60, fallback_w = 60 }}'
    (tmp_path / "site.toml").write_text(f"[supplies.site]\nbudget = {query}\n")
    process = CoordinatorProcess(
        tmp_path, tmp_path / "coordinator.db", "--site-file", str(tmp_path / "site.toml"), *JSON
    )
    await process.start()
    try:
        until(lambda: Meter.asked >= 2)
        address = process.addresses["page_address"]
        with urllib.request.urlopen(f"http://{address}/", timeout=30) as page:
            assert page.status == 200
        with socket.create_connection(split_address(address)) as strange:
            strange.sendall(b"no HTTP\r\n\r\n")
            assert strange.recv(12) == b"HTTP/1.1 400"
    finally:
        assert process.stop() == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert [each for each in lines if each["message"].startswith(f"coordinator serves {process.address}")]
    of_others = [each for each in lines if each["logger"].split(".")[0] not in ("coordinator", "wattfleet_io")]
    assert [(each["logger"], each["level"]) for each in of_others] == [("uvicorn.error", "warning")]


async def test_what_ends_a_coordinator_is_an_object(tmp_path: Path) -> None:
    first = CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *OPTIONS)
    await first.start()
    second_folder = tmp_path / "second"
    second_folder.mkdir()
    second = CoordinatorProcess(second_folder, second_folder / "coordinator.db", *OPTIONS)
    second.address = first.address
    try:
        second.begin()
        with pytest.raises(AssertionError):  # the process has ended
            until(lambda: second.serves)
    finally:
        first.stop()
    lines = [json.loads(line) for line in second.log.read_text().splitlines()]
    assert lines[-1]["level"] == "error" and first.address.split(":")[1] in lines[-1]["message"]
