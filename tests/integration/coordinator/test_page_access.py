"""Access to the web page, and that the coordinator starts even if the page cannot be served."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, certified
from tests.fakes.served import serving
from wattfleet.errors import InvalidInputError
from wattfleet_identity.identity_folder import Identity
from wattfleet_identity.peers import Role
from wattfleet_io.addresses import split_address

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
    settings = certified(config, fleet.authority.folder).with_values(server={"page_address": "0.0.0.0:0"})

    def context_of(identity: Identity | None) -> ssl.SSLContext:
        return fleet.https_context(identity, tmp_path / "caller")

    async with serving(settings) as served:
        assert served.bound.page_address is not None
        url = f"https://127.0.0.1:{split_address(served.bound.page_address)[1]}"
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
        url = f"http://{served.bound.page_address}"
        assert "Fleet" in await text_at(url)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            await text_at(url, host="rebound.example")


def port_after_a_free_one() -> socket.socket:
    """A listening socket whose port follows directly after a free one."""
    while True:
        taken = socket.create_server(("127.0.0.1", 0))
        try:
            socket.create_server(("127.0.0.1", taken.getsockname()[1] - 1)).close()
            return taken
        except OSError:
            taken.close()


async def test_an_address_in_use_stops_a_coordinator_only_if_it_was_named(config: CoordinatorSettings) -> None:
    with port_after_a_free_one() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match="in use|cannot listen|cannot serve"):
            async with serving(config.with_values(server={"page_address": f"127.0.0.1:{port}"})):
                pass
        beside = config.with_values(server={"metrics_address": f"127.0.0.1:{port - 1}"})
        async with serving(beside) as served:
            assert served.bound.page_address is None


async def test_there_is_no_page_if_none_is_wanted(config: CoordinatorSettings) -> None:
    async with serving(config.with_values(server={"page_address": "none"})) as served:
        assert served.bound.page_address is None
