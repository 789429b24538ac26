"""Files and HTTP responses with arbitrary content are read, or refused with an error of Wattfleet."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from coordinator.budgets.prometheus_budget import PrometheusBudget, fetch
from coordinator.errors import BudgetSourceError
from edge_agent.devices.selection import open_virtual_board
from tests.fakes.coordinator_in_process import on_loop
from tests.fuzz.campaign import Campaign, bounded_memory, service_log
from tests.fuzz.file_formats import Format, formats
from tests.fuzz.hostile_input import hostile_content, place, remove
from wattfleet.core.budgets import ReadingRule
from wattfleet.core.errors import WattfleetError

FORMATS = (
    "site file", "coordinator settings", "agent settings", "corpus", "journal", "profile of the agent's commands",
    "knob backup", "outbox", "welcome", "session status", "installation", "reference", "predictor of the agent",
    "nvpmodel.conf", "Prometheus answer", "journal of proxy runs", "store", "address of metrics",
    "revoked certificates", "description of a board", "idle power",
    "charge of a battery",
)  # fmt: skip


@pytest.fixture(scope="module")
def all_formats(profiled_state: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Format]:
    return formats(profiled_state, open_virtual_board("simulated:orin-nano", 0), tmp_path_factory.mktemp("made"))


def _write(folder: Path, form: Format) -> None:
    for name, content in form.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        remove(folder / name)
        (folder / name).write_bytes(content)


def test_every_format_is_fuzzed(all_formats: dict[str, Format]) -> None:
    assert set(all_formats) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_valid_file_is_read(name: str, all_formats: dict[str, Format], tmp_path: Path) -> None:
    _write(tmp_path, all_formats[name])
    all_formats[name].read(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_no_file_fails_its_reader(
    name: str, all_formats: dict[str, Format], tmp_path: Path, campaign: Campaign
) -> None:
    form = all_formats[name]
    with service_log() as log, bounded_memory():
        for hostile in campaign.inputs(at_least=5):
            for left in [path for path in tmp_path.rglob("*") if not path.is_dir() or path.is_symlink()]:
                left.unlink()
            _write(tmp_path, form)
            damaged = hostile.choice(list(form.files))
            remove(tmp_path / damaged)
            made = place(hostile, tmp_path / damaged, hostile_content(hostile, form.files[damaged]), form.is_a_file)
            with campaign.judged(f"{damaged}: {made}", log):
                with suppress(WattfleetError):
                    form.read(tmp_path)


_BODY = (
    b'{"status":"success","data":{"resultType":"vector","result":'
    b'[{"metric":{"__name__":"watts"},"value":[4102444800,"123.4"]}]}}'
)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_ANSWERS = (
    _HEAD + b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY,
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\n\r\n",
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    b'{"status":"error","errorType":"bad_data","error":"parse error"}',
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
)


def test_no_answer_over_http_fails_the_coordinator(campaign: Campaign) -> None:
    on_loop(_no_answer_over_http_fails_the_coordinator(campaign)).result()


async def _no_answer_over_http_fails_the_coordinator(campaign: Campaign) -> None:
    answer = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    budget = PrometheusBudget(url, "watts", 15.0, ReadingRule(60.0, 50.0))
    async with server:
        with service_log() as log, bounded_memory():
            for hostile in campaign.inputs(at_least=5):
                answer = hostile_content(hostile, hostile.choice(_ANSWERS))
                with campaign.judged(answer[:2_000], log), suppress(BudgetSourceError):
                    await fetch(budget, timeout_s=1.0)
        answer = _ANSWERS[0]
        assert (await fetch(budget)).watts == 123.4
