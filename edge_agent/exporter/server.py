"""Serves an agent's metrics at `/metrics`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app

from edge_agent.exporter.collector import AgentCollector
from edge_agent.exporter.figures import AgentFigures, DeviceFacts
from edge_agent.exporter.protection import access_of, is_exposed
from edge_agent.exporter.served_address import noted
from edge_agent.settings import AgentSettings
from wattfleet.errors import WattfleetError
from wattfleet_identity.channels import PLAINTEXT_WARNING
from wattfleet_identity.http_server import HttpLimits, serving_http
from wattfleet_identity.identity_folder import read_identity
from wattfleet_io.addresses import split_address

_log = logging.getLogger(__name__)

_LIMITS = HttpLimits(connections=16)


@asynccontextmanager
async def metrics_served(
    settings: AgentSettings,
    address: str,
    device: DeviceFacts,
    figures: Callable[[], AgentFigures],
    is_revoked: Callable[[str], bool],
) -> AsyncIterator[str]:
    """Serve `/metrics` from a thread within this context; yield its URL.

    Args:
        settings: the agent's settings.
        address: host:port to listen on; port 0 uses a free one.
        device: the device that the agent serves.
        figures: returns what the agent knows now; called in the server's thread.
        is_revoked: returns whether the certificate with a serial number was revoked; called in that thread, too.

    Raises:
        InvalidInputError: the address is in use or does not exist, or would be served as plaintext although that is not
            allowed.
    """
    folder, insecure = settings.identity_folder, settings.session.insecure
    access = access_of(address, folder, insecure, is_revoked)
    registry = CollectorRegistry()

    def expires_at() -> datetime | None:
        try:
            identity = read_identity(folder)
        except WattfleetError:  # the session reports it
            return None
        return None if identity is None else identity.certificate.not_after

    registry.register(AgentCollector(device, figures, expires_at))
    ProcessCollector(registry=registry)
    host, port = split_address(address)
    if is_exposed(address, folder, insecure):
        _log.warning("the address of the metrics, %s, is %s", address, PLAINTEXT_WARNING)
    async with serving_http(make_asgi_app(registry), "metrics", host, port, _LIMITS, access) as bound:
        url = f"{'http' if access is None else 'https'}://{host}:{bound}/metrics"
        with noted(url, settings.device.state_dir):
            _log.info("metrics are served at %s", url)
            yield url
