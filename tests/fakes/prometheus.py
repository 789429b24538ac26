"""A real Prometheus on loopback; tests that use it are skipped if it is not installed."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.polling import until

_STOP_S = 20.0


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus process that scrapes every second."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of a reply of its API.

        Raises:
            HTTPError: it refuses the request, for example because it cannot evaluate a query.
        """
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}{query}", timeout=10) as response:
            return json.load(response)["data"]

    def values(self, query: str) -> list[float]:
        """The current values of a query, without NaN."""
        found = [float(each["value"][1]) for each in self.get("query", query=query)["result"]]
        return [value for value in found if not math.isnan(value)]


def plaintext_job(name: str, target: str) -> dict[str, Any]:
    """A scrape job for an unprotected address, host:port."""
    return {"job_name": name, "static_configs": [{"targets": [target]}]}


@contextmanager
def scraping(jobs: Sequence[Mapping[str, Any]], folder: Path, rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Run a Prometheus.

    Args:
        jobs: the scrape jobs, in the form of `scrape_configs`.
        folder: folder for its files.
        rules: files of rules that it evaluates.
    """
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed (Debian's package prometheus brings it)")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(each) for each in rules],
        "scrape_configs": jobs,
    }
    written = folder / "prometheus.yml"
    written.write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = Prometheus(f"http://127.0.0.1:{port}")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={written}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: _is_ready(found))
            yield found
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _is_ready(prometheus: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=5):
            return True
    except OSError:  # including the error statuses of HTTP
        return False
