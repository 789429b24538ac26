"""The metrics that an agent serves itself."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from edge_agent.paths import EXPORTER_FILE
from edge_agent.settings import AgentSettings
from wattfleet.common.addresses import split_address
from wattfleet.common.atomic_files import make_state_folder, read_regular_file, remove_file, replace_file
from wattfleet.common.build_metric import build_family
from wattfleet.common.identity.certificates import CertificateCheck
from wattfleet.common.identity.channels import PLAINTEXT_WARNING, is_loopback, require_identity
from wattfleet.common.identity.http_access import HttpAccess, ServerTls
from wattfleet.common.identity.http_server import HttpLimits, serving_http
from wattfleet.common.identity.identity_folder import read_identity
from wattfleet.common.parsing import parse_json
from wattfleet.core.duties import LATENCY_LIMITS_MS, KeptDuty
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.device_state import FIGURES, BoardSample, DeviceState

_log = logging.getLogger(__name__)


# --- Served address ---------------------------------------------------------------------------------------------------
# Records the address of a running agent's metrics for `wattfleet agent status`.


@contextmanager
def noted(url: str, state_directory: Path) -> Iterator[None]:
    """Record the URL of the metrics within this context."""
    path = state_directory / EXPORTER_FILE
    try:
        make_state_folder(state_directory)
        replace_file(path, json.dumps({"url": url}).encode() + b"\n")
    except OSError as error:
        _log.debug("%s: cannot be written: %s", path, error.strerror)
    try:
        yield
    finally:
        try:
            remove_file(path)
        except OSError as error:
            _log.debug("%s: cannot be removed: %s", path, error.strerror)


def read_url(state_directory: Path) -> str | None:
    """Return the recorded URL of the metrics; None if they are not served.

    Raises:
        InvalidInputError: the file cannot be read, or is damaged.
    """
    path = state_directory / EXPORTER_FILE
    try:
        url = parse_json(read_regular_file(path))["url"]
        if not isinstance(url, str):
            raise ValueError
        return url
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(f"{path}: is damaged; the agent writes it again when it starts") from None


# --- Figures ----------------------------------------------------------------------------------------------------------
# The figures that an agent exports of itself and its board at one moment.


@dataclass(frozen=True)
class DeviceFacts:
    """The identity of a device.

    Attributes:
        device_id: the device's name in the fleet.
        board: its kind of board.
        provenance: whether its figures are simulated, replayed, measured on hardware, or its watts stated.
    """

    device_id: str
    board: str
    provenance: str


@dataclass(frozen=True)
class AgentFigures:
    """What the agent knows now.

    Attributes:
        sample: the latest readings of the board's sensors; None before the first, and while they cannot be read.
        state: the device's state.
        profiled_modes: number of power modes measured of the latest workload.
        modes_to_measure: maximum of modes that the profile in progress measures; None without one.
        is_connected: whether there is a session, to which the coordinator has welcomed the device.
        waiting_reports: number of reports that the coordinator has not acknowledged.
        trainings: number of trainings begun since the agent started.
        granted_w: watts that the training in progress may draw; None without one.
        duty: how the duty in force is kept; None without one.
    """

    sample: BoardSample | None
    state: DeviceState
    profiled_modes: int
    modes_to_measure: int | None
    is_connected: bool
    waiting_reports: int
    trainings: int
    granted_w: float | None
    duty: KeptDuty | None


# --- Protection -------------------------------------------------------------------------------------------------------
# Decides who may read an agent's metrics: everybody on its machine, and viewers and operators elsewhere over TLS.


def is_exposed(address: str, identity_folder: Path, is_insecure: bool) -> bool:
    """Return whether other machines can reach an address without TLS.

    Args:
        address: host:port to serve metrics on.
        identity_folder: the folder of the agent's identity, which may be empty.
        is_insecure: whether `--insecure` was given.

    Raises:
        InvalidInputError: they could although that is not allowed, or the identity is damaged.
    """
    if is_loopback(split_address(address)[0]):
        return False
    identity = read_identity(identity_folder)
    if identity is None:
        if is_insecure:
            return True
        raise InvalidInputError(
            f"--metrics-address {address}: other machines can reach it, and {identity_folder} has no certificate to"
            " protect it: enrol this device with `wattfleet agent join`, use a loopback address such as"
            " 127.0.0.1:9466, or pass --insecure for plaintext"
        )
    return False


def access_of(
    address: str, identity_folder: Path, is_insecure: bool, is_revoked: Callable[[str], bool]
) -> HttpAccess | None:
    """Return who may read from other machines over TLS; None if TLS is not used. A renewed certificate is used at once.

    Args:
        address: host:port to serve metrics on.
        identity_folder: the folder of the agent's identity, which may be empty.
        is_insecure: whether `--insecure` was given.
        is_revoked: returns whether the certificate with a serial number was revoked.

    Raises:
        InvalidInputError: as for `is_exposed`.
    """
    if is_exposed(address, identity_folder, is_insecure) or is_loopback(split_address(address)[0]):
        return None

    def tls() -> ServerTls:
        identity = require_identity(identity_folder)
        return ServerTls(identity.key_pem, identity.certificate_pem, identity.trusted_pem)

    return HttpAccess(tls, CertificateCheck(require_identity(identity_folder).peer.fleet, is_revoked))


# --- Collector --------------------------------------------------------------------------------------------------------
# Exports an agent and its board as metric families. An unknown value has no sample; it is never exported as 0.


class AgentCollector(Collector):
    """Exports one agent."""

    def __init__(
        self, device: DeviceFacts, figures: Callable[[], AgentFigures], expires_at: Callable[[], datetime | None]
    ) -> None:
        """Set up the collector of one agent.

        Args:
            device: the device that it serves.
            figures: returns what the agent knows now; called in the thread of a request.
            expires_at: returns when its certificate expires; None without one.
        """
        self._device = device
        self._figures = figures
        self._expires_at = expires_at

    def collect(self) -> Iterator[Metric]:
        """Return all families, from the current figures."""
        figures, device = self._figures(), self._device
        info = GaugeMetricFamily(
            "wattfleet_agent_info",
            "Always 1; the labels say what the device is",
            labels=["device", "board", "provenance"],
        )
        info.add_metric([device.device_id, device.board, device.provenance], 1.0)
        yield info
        yield build_family()
        yield from _agent_families(figures)
        yield from _board_families(figures.sample)
        yield from _duty_families(figures.duty)
        expiry = GaugeMetricFamily(
            "wattfleet_agent_certificate_expiry_timestamp_seconds",
            "When the device's certificate expires, in seconds since 1970",
        )
        if (expires_at := self._expires_at()) is not None:
            expiry.add_metric([], expires_at.timestamp())
        yield expiry


def _agent_families(figures: AgentFigures) -> Iterator[Metric]:
    """Return the families on what the agent is doing."""
    state = GaugeMetricFamily(
        "wattfleet_agent_state", "Always 1; the label is the device's current state", labels=["state"]
    )
    state.add_metric([figures.state.value], 1.0)
    yield state
    for name, text, value in (
        ("connected", "1 while the coordinator holds a session with this device, else 0", float(figures.is_connected)),
        ("waiting_reports", "Reports that the coordinator has not acknowledged", figures.waiting_reports),
        ("profiled_modes", "Power modes measured of the latest workload", figures.profiled_modes),
        ("modes_to_measure", "Power modes that the profile in progress measures at most", figures.modes_to_measure),
        ("granted_watts", "Watts that the training in progress may draw", figures.granted_w),
    ):
        yield _gauge(f"wattfleet_agent_{name}", text, value)
    yield CounterMetricFamily(
        "wattfleet_agent_trainings", "Trainings that have begun since the agent started", figures.trainings
    )


def _board_families(sample: BoardSample | None) -> Iterator[Metric]:
    """Return the families with the board's latest sensor readings; a missing sensor has no sample."""
    for reading, value_of in FIGURES:
        family = _counter if reading.is_count else _gauge
        yield family(f"wattfleet_board_{reading.metric}", reading.text, value_of(sample or BoardSample()))


def _duty_families(duty: KeptDuty | None) -> Iterator[Metric]:
    """Return the families on how the device answers its duty's requests; another duty resets the counters."""
    latency = HistogramMetricFamily(
        "wattfleet_agent_duty_latency_seconds", "Seconds from a request's arrival to its answer"
    )
    if duty is not None:
        limits = [*(str(limit_ms / 1e3) for limit_ms in LATENCY_LIMITS_MS), "+Inf"]
        buckets = list(zip(limits, accumulate(map(float, duty.latency_counts)), strict=True))
        latency.add_metric([], buckets, duty.latency_sum_ms / 1e3)
    yield latency
    yield _counter(
        "wattfleet_agent_duty_requests", "Requests with an answer or an error", None if duty is None else duty.requests
    )
    yield _counter(
        "wattfleet_agent_duty_missed",
        "Requests that were answered too late, or with an error",
        None if duty is None else duty.missed,
    )


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float | None) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text)
    if value is not None:
        family.add_metric([], value)
    return family


# --- Server -----------------------------------------------------------------------------------------------------------
# Serves an agent's metrics at `/metrics`.

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
