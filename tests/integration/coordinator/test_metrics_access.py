"""Access to /metrics on an address that other machines can reach."""

from __future__ import annotations

import asyncio
import http.client
import re
import ssl
import urllib.request
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, certified
from tests.fakes.served import serving
from wattfleet_identity.identity_folder import Identity
from wattfleet_identity.peers import Role
from wattfleet_io.addresses import split_address

_WITHIN_S = 20.0


async def test_metrics_for_other_machines_need_a_viewers_certificate(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    settings = certified(config, fleet.authority.folder).with_values(server={"metrics_address": "0.0.0.0:0"})

    def context_of(identity: Identity | None) -> ssl.SSLContext:
        return fleet.https_context(identity, tmp_path / "caller")

    def scraped(port: int, identity: Identity | None) -> str:
        url = f"https://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=_WITHIN_S, context=context_of(identity)) as response:
            return str(response.read().decode())

    def plain(port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_WITHIN_S):
            pass

    async with serving(settings) as served:
        port = split_address(served.bound.metrics_address)[1]
        text = await asyncio.to_thread(scraped, port, fleet.identity(Role.VIEWER, "prometheus"))
        [expiry] = re.findall(r'wattfleet_certificate_expiry_timestamp_seconds\{role="coordinator"\} (\S+)', text)
        assert float(expiry) == pytest.approx(fleet.authority.server.not_after.timestamp())
        for refused in (None, fleet.identity(Role.DEVICE, "orin")):
            with pytest.raises((OSError, http.client.HTTPException)):
                await asyncio.to_thread(scraped, port, refused)
        with pytest.raises((OSError, http.client.HTTPException)):
            await asyncio.to_thread(plain, port)
