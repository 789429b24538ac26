"""Serves the coordinator's metrics at `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime

from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app

from coordinator.metrics.exposure_collector import ExposureCollector
from coordinator.metrics.fleet_collector import FleetCollector
from coordinator.metrics.service_collector import ServiceCollector
from coordinator.service_figures import ServiceFigures
from coordinator.settings import ServerSettings
from coordinator.state.fleet import Fleet
from wattfleet_identity.http_access import HttpAccess
from wattfleet_identity.http_server import HttpLimits, serving_http


def metrics_served(
    fleet: Fleet,
    host: str,
    port: int,
    settings: ServerSettings | None = None,
    access: HttpAccess | None = None,
    exposed: int = 0,
    figures: ServiceFigures | None = None,
    expiries: Callable[[], Mapping[str, datetime]] = dict,
) -> AbstractAsyncContextManager[int]:
    """Serve `/metrics` from a thread until the context is left, and yield the port; port 0 picks a free one.

    Args:
        fleet: the fleet to export.
        host: the address to listen on.
        port: the port.
        settings: limits on the connections.
        access: who may read over HTTPS; None lets everybody read over HTTP.
        exposed: addresses of the coordinator that other machines reach in plaintext.
        figures: measurements of the coordinator itself; None exports zeros.
        expiries: when the certificate of each role expires first.

    Raises:
        InvalidInputError: the address is in use or does not exist.
    """
    registry = CollectorRegistry()
    settings = settings or ServerSettings()
    registry.register(FleetCollector(fleet, settings.metrics_devices))
    registry.register(ExposureCollector(exposed))
    registry.register(ServiceCollector(figures or ServiceFigures(), expiries))
    ProcessCollector(registry=registry)
    limits = HttpLimits(settings.max_http_connections, settings.http_timeout_s)
    return serving_http(make_asgi_app(registry), "metrics", host, port, limits, access)
