"""With `--log-format json`, every line that a coordinator writes is an object."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.coordinator_process import CoordinatorProcess
from tests.fakes.polling import until

OPTIONS = ("--site-budget-w", "50", "--page-address", "127.0.0.1:0", "--log-format", "json")


async def test_a_coordinator_with_a_page_writes_no_text(tmp_path: Path) -> None:
    process = CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *OPTIONS)
    await process.start()
    try:
        with urllib.request.urlopen(f"http://{process.addresses['page_address']}/", timeout=30) as page:
            assert page.status == 200
    finally:
        assert process.stop() == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert [each for each in lines if each["message"].startswith(f"coordinator serves {process.address}")]
    assert any(each["logger"].startswith("uvicorn") for each in lines)


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
