"""Limits on the requests of one peer, so that it leaves room for the others.

A peer is a connection or a host. A fleet behind one address is one host with a connection for each device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.errors import QuotaExceededError
from coordinator.settings import PeerSettings
from wattfleet_io.token_bucket import TokenBucket

_SESSION_SERVICE = "/wattfleet.v1.SessionService/"
_BURST_S = 2.0
_MAX_HOSTS = 10_000
"""The most hosts whose rate is tracked; beyond this, the oldest is dropped."""


def host_of(peer: str) -> str:
    """The host of a peer that gRPC names, for example, `ipv4:10.0.0.7:41234`; equal for all connections of one host."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class HostRates:
    """A token bucket for each host."""

    def __init__(self, per_s: float, burst: float) -> None:
        """Start with full buckets.

        Args:
            per_s: the most events per second of one host, on average.
            burst: the most events of one host at once.
        """
        self._per_s, self._burst = per_s, burst
        self._buckets: dict[str, TokenBucket] = {}

    def of(self, host: str, now_s: float) -> TokenBucket:
        """Get a host's bucket."""
        if host not in self._buckets:
            if len(self._buckets) >= _MAX_HOSTS:
                del self._buckets[next(iter(self._buckets))]
            self._buckets[host] = TokenBucket.full(self._per_s, self._burst, now_s)
        return self._buckets[host]


class PeerQuotas:
    """The calls in progress and the requests of every peer."""

    def __init__(self, settings: PeerSettings = PeerSettings(), now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without any call.

        Args:
            settings: the limits.
            now_s: a clock, in seconds.
        """
        self._settings = settings
        self._now_s = now_s
        self._of_connection: Counter[str] = Counter()
        self._of_host: Counter[str] = Counter()
        rate = settings.requests_per_s
        self._requests = HostRates(rate, max(1.0, _BURST_S * rate))

    @contextmanager
    def admitted(self, method: str, context: Any) -> Iterator[None]:
        """Count a call while it is in progress.

        Raises:
            QuotaExceededError: the peer has too many calls in progress, or sends too many requests.
        """
        connection: str = context.peer()
        host = host_of(connection)
        for calls, name, limit, what, setting in (
            (
                self._of_connection,
                connection,
                self._settings.calls_per_connection,
                "one connection",
                "peers.calls_per_connection",
            ),
            (self._of_host, host, self._settings.calls_per_host, "one host", "peers.calls_per_host"),
        ):
            if calls[name] >= limit:
                raise QuotaExceededError(
                    f"{limit:,} calls of {what} are in progress, which is the limit: end some, or raise the "
                    f"coordinator's setting {setting}"
                )
        # Agents spread their reconnections, and a session limits its own messages.
        if not method.startswith(_SESSION_SERVICE) and not self._may_request(host):
            raise QuotaExceededError(
                f"one host may send {self._settings.requests_per_s:g} requests each second: send fewer, or raise the"
                " coordinator's setting peers.requests_per_s"
            )
        self._of_connection[connection] += 1
        self._of_host[host] += 1
        try:
            yield
        finally:
            _count_down(self._of_connection, connection)
            _count_down(self._of_host, host)

    def _may_request(self, host: str) -> bool:
        now_s = self._now_s()
        return self._requests.of(host, now_s).take(now_s)


def _count_down(calls: Counter[str], name: str) -> None:
    calls[name] -= 1
    if not calls[name]:
        del calls[name]
