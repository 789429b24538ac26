"""The web page's server: access, mutual TLS, failures of the coordinator, and a large fleet."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import ssl
import stat
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import pkcs12
from typer.testing import CliRunner

from coordinator.cli.commands import app
from coordinator.errors import StoreUnavailableError
from coordinator.page import application, fleet_page
from coordinator.page import snapshots as snapshots_module
from coordinator.page.queries import Queries
from coordinator.page.snapshots import Snapshots
from coordinator.services.event_log import StateTimes
from coordinator.services.views import ViewServicer
from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import browsing
from tests.fakes.served import CertifiedFleet, Client, calling, certified, joined, serving
from tests.fakes.small_fleet import ORIN_FRONT, small_fleet
from wattfleet.common.addresses import split_address
from wattfleet.common.cli import exit_code
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.joining import Applicant
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode
from wattfleet_proto.device_state import BoardSample, DeviceState
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc, operator_pb2, view_pb2

# --- Page access ------------------------------------------------------------------------------------------------------
# Access to the web page.


_WITHIN_S = 30.0
_REFUSED = (OSError, http.client.HTTPException)


async def text_at(url: str, context: ssl.SSLContext | None = None, host: str | None = None) -> str:
    def read() -> str:
        request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
        with urllib.request.urlopen(request, timeout=_WITHIN_S, context=context) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


async def test_other_machines_need_a_certificate_and_the_audit_log_an_operators(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    settings = certified(config, fleet.authority.folder).with_values(server={"http_address": "0.0.0.0:0"})

    def context_of(identity: Identity | None) -> ssl.SSLContext:
        return fleet.https_context(identity, tmp_path / "caller")

    async with serving(settings) as served:
        url = f"https://127.0.0.1:{split_address(served.bound.http_address)[1]}"
        viewer = context_of(fleet.identity(Role.VIEWER, "dashboard"))
        assert "No device has connected yet" in await text_at(url, viewer)
        assert "needs an operator's certificate" in (await text_at(f"{url}/events", viewer)).replace("&#39;", "'")
        operator = context_of(fleet.identity(Role.OPERATOR, "anna"))
        assert "No operator has changed anything" in await text_at(f"{url}/events", operator)
        for refused in (None, fleet.identity(Role.DEVICE, "orin")):
            with pytest.raises(_REFUSED):
                await text_at(url, context_of(refused))
        with pytest.raises(_REFUSED):
            await text_at(url.replace("https", "http"))


async def test_on_loopback_the_page_answers_to_no_foreign_name(config: CoordinatorSettings) -> None:
    async with serving(config) as served:
        url = f"http://{served.bound.http_address}"
        assert "Fleet" in await text_at(url)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            await text_at(url, host="rebound.example")


# --- Page over TLS ----------------------------------------------------------------------------------------------------
# The web page over mutual TLS in a real browser, with the file that `browser-certificate` writes.

_NOTE_STATUS = """() => {
  const status = document.getElementById("connection");
  window.shown = [];
  new MutationObserver(() => window.shown.push(status.textContent)).observe(status, { childList: true });
}"""
"""Notes each text that the page shows at its top right."""

_RECONNECTS_WITHIN_S = 5.0
"""Chromium asks for a stream that has ended again after three seconds."""


def bundle_of(identity: Identity, folder: Path) -> tuple[Path, str, str]:
    """The output of `browser-certificate` for an identity: the file, its password, and the printed text."""
    write_identity(folder / "identity", identity)
    file = folder / "wattfleet.p12"
    done = CliRunner().invoke(app, ["browser-certificate", str(file), "--identity", str(folder / "identity")])
    assert done.exit_code == 0, done.output
    password = re.search(r"password for the import: (\S+)", done.output)
    assert password is not None
    return file, password[1], done.output


@asynccontextmanager
async def guarded_page(config: CoordinatorSettings, fleet: CertifiedFleet) -> AsyncIterator[tuple[Client, str]]:
    """A coordinator whose page is on an address for other machines, and the page's host and port."""
    settings = certified(config, fleet.authority.folder).with_values(server={"http_address": "0.0.0.0:0"})
    async with serving(settings) as client:
        yield client, f"127.0.0.1:{split_address(client.bound.http_address)[1]}"


def certificate_option(host: str, identity: Identity, folder: Path) -> dict[str, Any]:
    """Playwright's options for a browser that has imported an identity."""
    file, password, _ = bundle_of(identity, folder)
    sent = {"origin": f"https://{host}", "pfxPath": str(file), "passphrase": password}
    return {"client_certificates": [sent], "ignore_https_errors": True}


@pytest.mark.parametrize(
    ("role", "told"),
    [(Role.VIEWER, "needs an operator's certificate"), (Role.OPERATOR, "No operator has changed anything")],
)
async def test_a_browser_with_an_imported_certificate_reads_what_its_role_may(
    config: CoordinatorSettings, tmp_path: Path, role: Role, told: str
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    async with guarded_page(config, fleet) as (_, host):
        options = certificate_option(host, fleet.identity(role, "anna"), tmp_path)
        async with browsing(host, **options) as tab:
            await tab.page.goto(f"https://{host}/")
            await tab.page.wait_for_selector(".connection.live")
            assert "No device has connected yet" in await tab.page.inner_text("main")
            await tab.page.click("nav >> text=Events")
            assert told in await tab.page.inner_text("main")
            assert tab.complaints == [] and tab.elsewhere == []


async def test_a_browser_without_a_certificate_is_refused(config: CoordinatorSettings, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    fleet = CertifiedFleet.create(tmp_path / "authority")
    async with guarded_page(config, fleet) as (_, host), browsing(host, ignore_https_errors=True) as tab:
        with pytest.raises(playwright.Error, match="net::ERR_(BAD_SSL_CLIENT_AUTH_CERT|SOCKET|CONNECTION|SSL|EMPTY)"):
            await tab.page.goto(f"https://{host}/")


async def test_a_browser_whose_certificate_is_revoked_is_told_and_reads_no_more(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    async with (
        guarded_page(config, fleet) as (client, host),
        calling(client, fleet.identity(Role.OPERATOR, "otto")) as operator,
    ):
        service: Any = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        viewer = await joined(service, Role.VIEWER, Applicant(), "anna")
        async with browsing(host, **certificate_option(host, viewer, tmp_path)) as tab:
            await tab.page.goto(f"https://{host}/runs")
            await tab.page.wait_for_selector(".connection.live")
            await tab.page.evaluate(_NOTE_STATUS)
            await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="anna"))
            await tab.until("window.shown.length > 0")
            await asyncio.sleep(_RECONNECTS_WITHIN_S)
            [reason] = await tab.page.evaluate("window.shown")
            assert "certificate of viewer anna was revoked" in reason
            assert await tab.page.is_visible(".connection.away")
            answer = await tab.page.evaluate("fetch('/runs').then((each) => each.status, () => 'closed')")
            assert answer in (403, "closed")


def test_the_bundle_is_private_and_complete(tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    identity = fleet.identity(Role.VIEWER, "anna", lifetime=timedelta(days=3))
    file, password, output = bundle_of(identity, tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = pkcs12.load_pkcs12(file.read_bytes(), password.encode())
    assert found.cert is not None and found.cert.certificate.serial_number == int(identity.certificate.serial, 16)
    assert found.key is not None and found.key.public_key() == found.cert.certificate.public_key()
    assert len(found.additional_certs) == 1
    assert f"{identity.certificate.not_after:%Y-%m-%d}" in output and "trusted.pem" in output
    assert "Create a browser profile only for the page" in output and "could pose as any" in output
    with pytest.raises(ValueError, match="password|PKCS12"):
        pkcs12.load_pkcs12(file.read_bytes(), b"a wrong one")


def test_a_device_has_no_bundle_and_a_folder_without_identity_says_what_to_do(tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(tmp_path / "device", fleet.identity(Role.DEVICE, "orin"))
    for folder, told in (("device", "--role viewer"), ("nowhere", "wattfleet join")):
        command = ["browser-certificate", str(tmp_path / "x.p12"), "--identity", str(tmp_path / folder)]
        done = CliRunner().invoke(app, command)
        assert done.exit_code != 0 and told in str(done.exception), folder
        assert not (tmp_path / "x.p12").exists()


def test_a_file_that_is_there_already_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "identity"
    write_identity(folder, CertifiedFleet.create(tmp_path / "authority").identity(Role.VIEWER, "anna"))
    link = tmp_path / "link.p12"
    link.symlink_to(tmp_path / "absent")
    before = (folder / "key.pem").read_bytes()
    for file in (folder / "key.pem", link):
        done = CliRunner().invoke(app, ["browser-certificate", str(file), "--identity", str(folder)])
        assert isinstance(done.exception, InvalidInputError) and exit_code(done.exception) == 2
        assert str(done.exception) == f"{file} exists already: remove it, or name another file"
    assert (folder / "key.pem").read_bytes() == before
    assert link.is_symlink()


# --- Page failures ----------------------------------------------------------------------------------------------------
# The web page's messages when the coordinator fails, and the details in the log.

_DESK = {"width": 1280, "height": 900}
_DETAIL = "a detail that viewers must not see"


def fails(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError(_DETAIL)


async def answer_of(url: str) -> tuple[int, Message, str]:
    """The status, headers and text of a response; for a stream, the text that arrives before it ends."""

    def read() -> tuple[int, Message, str]:
        try:
            with urllib.request.urlopen(url, timeout=_WITHIN_S) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    return await asyncio.to_thread(read)


def logged(caplog: pytest.LogCaptureFixture, error_id: str) -> logging.LogRecord:
    """The one line of the log that contains an error's id."""
    [found] = [each for each in caplog.records if error_id in each.getMessage()]
    return found


def id_in(text: str) -> str:
    found = re.search(r"error ([0-9a-f]{8})", text)
    assert found is not None, text
    return found[1]


async def test_an_unexpected_error_is_a_page_with_the_id_of_its_log_line(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Queries, "audit_log", fails)
    async with serving(config) as client, browsing(client.bound.http_address, viewport=_DESK) as tab:
        url = f"http://{client.bound.http_address}/events"
        answer = await tab.page.goto(url)
        assert answer.status == 500
        error_id = id_in(await tab.page.inner_text("[role=alert]"))
        record = logged(caplog, error_id)
        assert record.exc_info is not None and _DETAIL in str(record.exc_info[1])
        assert record.levelno == logging.ERROR and "/events" in record.getMessage()
        body = await answer.text()
        assert _DETAIL not in body and "Traceback" not in body
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert await tab.accessibility_problems() == []
        await tab.page.click("nav >> text=Fleet")
        assert "No device has connected yet" in await tab.page.inner_text("main")


async def test_scripts_get_errors_as_json_with_the_id_of_the_log_line(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_page, "asdict", fails)
    monkeypatch.setattr(application, "StreamingResponse", fails)
    async with serving(config) as client:
        for path in ("/watts.json", "/updates"):
            status, headers, text = await answer_of(f"http://{client.bound.http_address}{path}")
            assert status == 500 and headers["Content-Type"] == "application/json"
            assert path in logged(caplog, id_in(json.loads(text)["detail"])).getMessage()
            assert _DETAIL not in text


async def test_a_stream_of_updates_that_fails_ends_with_the_reason(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Snapshots, "after", fails)
    async with serving(config) as client:
        status, _, text = await answer_of(f"http://{client.bound.http_address}/updates")
    assert status == 200 and text.startswith("event: failure\ndata: ")
    assert logged(caplog, id_in(text)).exc_info is not None
    assert _DETAIL not in text


async def test_pages_say_why_they_are_not_up_to_date_until_they_are_again(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*arguments: Any) -> Any:
        raise StoreUnavailableError("the database <b>does not answer")

    async with serving(config) as client, browsing(client.bound.http_address, viewport=_DESK) as tab:
        await tab.page.goto(f"http://{client.bound.http_address}/runs")
        await tab.page.wait_for_selector(".connection.live")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Queries, "budgets", unavailable)
            await tab.page.wait_for_selector(".connection.away:has-text('the database <b>does not answer')")
            await asyncio.sleep(2.5)  # the time of two snapshots
        await tab.page.wait_for_selector(".connection.live")
        lines = [each for each in caplog.messages if "cannot be brought up to date" in each]
        assert len(lines) == 1, "one line for an outage"


async def test_without_any_snapshot_pages_fail_with_the_id_of_one_line_of_the_log(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts: list[str] = []

    def fails_differently(*arguments: Any) -> Any:
        texts.append(f"{_DETAIL}, for the {len(texts)}. time")
        raise RuntimeError(texts[-1])

    monkeypatch.setattr(Queries, "budgets", fails_differently)
    answers = []
    async with serving(config) as client, asyncio.timeout(_WITHIN_S):
        while len(texts) < 3:
            answers.append(await answer_of(f"http://{client.bound.http_address}/"))
            await asyncio.sleep(0.1)
    assert {status for status, _, _ in answers} == {503}
    [error_id] = {id_in(text) for _, _, text in answers}
    assert logged(caplog, error_id).exc_info is not None
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1


async def test_a_page_too_many_says_that_it_is_not_live_and_asks_again(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_MAX_VIEWERS", 0)
    async with serving(config) as client, browsing(client.bound.http_address, viewport=_DESK) as tab:
        await tab.page.clock.install()
        await tab.page.goto(f"http://{client.bound.http_address}/runs")
        await tab.page.wait_for_selector(".connection.away:has-text('0 viewers already receive updates')")
        monkeypatch.setattr(application, "_MAX_VIEWERS", 1)
        await tab.page.clock.fast_forward(11_000)
        await tab.page.wait_for_selector(".connection.live")


async def test_the_page_only_reads(config: CoordinatorSettings) -> None:
    async with serving(config) as client:

        def post() -> str:
            request = urllib.request.Request(f"http://{client.bound.http_address}/what-if", method="POST")
            with pytest.raises(urllib.error.HTTPError, match="405") as refused:
                urllib.request.urlopen(request, timeout=_WITHIN_S)
            return refused.value.read().decode()

        assert "The page only reads" in await asyncio.to_thread(post)


# --- Page of a large fleet --------------------------------------------------------------------------------------------
# A page over ten thousand devices: the coordinator's event loop is free after every hundred of them.

_DEVICES = 10_000
_SAMPLE = BoardSample(7.5, 61.0, PowerMode(6, 1_510_000, 624_750_000, 2_133_000_000), 0, 0.35, 0.02, 52_300.0)


class _Budgets:
    async def GetBudgets(self, request: Any, context: Any) -> operator_pb2.GetBudgetsResponse:  # noqa: N802
        return operator_pb2.GetBudgetsResponse(supplies=[operator_pb2.SupplyBudget(supply="site", watts=100.0)])

    async def GetBatteries(self, request: Any, context: Any) -> operator_pb2.GetBatteriesResponse:  # noqa: N802
        return operator_pb2.GetBatteriesResponse()


async def test_devices_are_read_only_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_WATCHED_S", 0.01), ("_UNWATCHED_S", 0.02), ("_OLD_S", 0.1), ("_MAX_SHARE", 1.0)):
        monkeypatch.setattr(snapshots_module, name, seconds)
    read = Counter[str]()

    class CountedQueries:
        fails = False

        def __getattr__(self, name: str) -> Any:
            async def answer() -> Any:
                read[name] += 1
                if self.fails and name == "devices":
                    raise StoreUnavailableError("the store is away")
                return view_pb2.GetFleetResponse() if name == "fleet" else []

            return answer

    queries: Any = CountedQueries()
    snapshots = Snapshots(queries)
    keeping = asyncio.create_task(snapshots.keep())
    try:
        first = await snapshots.newest()
        await asyncio.sleep(0.05)  # the snapshot that this look still asked for
        taken, sampled = read["devices"], read["budgets"]
        await asyncio.sleep(0.2)
        assert read["devices"] == taken, "nobody looks"
        assert read["budgets"] > sampled + 2 and len(snapshots.history.of("")) > 3, (
            "the watts are recorded all the same"
        )
        assert (await snapshots.newest()) is not first, "one that is so old is not shown"
        assert read["devices"] > taken
        await asyncio.sleep(0.2)
        queries.fails = True
        old = await snapshots.newest()
        assert snapshots.failure == "the store is away", "but it is, with the reason, if there cannot be a newer one"
        assert old.devices == []
    finally:
        keeping.cancel()


async def test_sessions_are_answered_while_a_snapshot_is_taken() -> None:
    fleet = small_fleet()
    for k in range(_DEVICES):
        device_id = f"device-{k}"
        fleet.agents.connect(device_id, "agx-orin", "simulated", 18_096)
        fleet.agents.report_front(device_id, ORIN_FRONT, 5.0, 50, "d" * 64, minibatches_per_epoch=100)
        fleet.agents.report_state(device_id, DeviceState.READY, 50, "parked")
        fleet.samples.report(device_id, _SAMPLE)

    async def no_times(what: object) -> dict[str, Any]:
        return {}

    repository: Any = SimpleNamespace(fleet=fleet, read=no_times)
    budgets: Any = _Budgets()
    nobody: Any = None
    queries = Queries(
        ViewServicer(repository, StateTimes(fleet.agents.devices, 50)), budgets, nobody, asyncio.get_running_loop()
    )

    async def snapshot() -> tuple[int, float]:
        snapshots, began_s = Snapshots(queries), time.perf_counter()
        keeping = asyncio.create_task(snapshots.keep())
        try:
            return len((await snapshots.newest()).devices), time.perf_counter() - began_s
        finally:
            keeping.cancel()

    began_cpu_s = time.process_time()
    taken = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(snapshot())))
    turns, longest_s, before_s = 0, 0.0, time.perf_counter()
    while not taken.done():
        await asyncio.sleep(0.001)
        turns, longest_s = turns + 1, max(longest_s, time.perf_counter() - before_s)
        before_s = time.perf_counter()
    devices, took_s = await taken
    cpu_s = time.process_time() - began_cpu_s
    print(
        f"{devices:,} devices in {took_s:.2f} s, {cpu_s:.2f} s of a core;"
        f" longest turn of the loop {1e3 * longest_s:.0f} ms"
    )
    assert devices == _DEVICES + 2
    assert turns > _DEVICES / 200
