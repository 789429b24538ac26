"""The web page over mutual TLS in a real browser, with the file that `browser-certificate` writes."""

from __future__ import annotations

import asyncio
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import pkcs12
from typer.testing import CliRunner

from coordinator.cli.commands import app
from coordinator.settings import CoordinatorSettings
from tests.fakes.browser import browsing
from tests.fakes.certified import CertifiedFleet, calling, certified, joined
from tests.fakes.served import Client, serving
from wattfleet.errors import InvalidInputError
from wattfleet_identity.identity_folder import Identity, write_identity
from wattfleet_identity.joining import Applicant
from wattfleet_identity.peers import Role
from wattfleet_io.addresses import split_address
from wattfleet_io.cli import exit_code
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc

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
    settings = certified(config, fleet.authority.folder).with_values(server={"page_address": "0.0.0.0:0"})
    async with serving(settings) as client:
        yield client, f"127.0.0.1:{split_address(str(client.bound.page_address))[1]}"


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
