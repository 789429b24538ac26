"""How many new devices each peer has enrolled: a limit, since every device stays known until it is forgotten."""

from __future__ import annotations

from coordinator.errors import TooManyDevicesError

_MAX_REMEMBERED = 20_000
"""The most connections and hosts whose enrolments are counted; the oldest are dropped."""


class Enrolments:
    """The new devices of each connection and of each host, so that reconnecting does not reset the limit."""

    def __init__(self, per_connection: int, per_host: int) -> None:
        """Start without any.

        Args:
            per_connection: new devices per connection.
            per_host: new devices per host.
        """
        self._of_connection, self._of_host = _Counts(per_connection), _Counts(per_host)

    def require_room(self, connection: str, host: str, device_id: str) -> None:
        """Make sure that a connection may enrol another device.

        Args:
            connection: the peer's address and port.
            host: the peer's address.
            device_id: the new device.

        Raises:
            TooManyDevicesError: the connection or the host has reached its limit.
        """
        if self._of_connection.is_full(connection):
            raise TooManyDevicesError(
                f"{device_id}: this connection has reached its limit of {self._of_connection.limit:,} new devices:"
                " give each agent its own connection, or raise the coordinator's setting"
                " sessions.max_new_devices_per_connection"
            )
        if self._of_host.is_full(host):
            raise TooManyDevicesError(
                f"{device_id}: this host has reached its limit of {self._of_host.limit:,} new devices: if its devices"
                " are yours, raise the coordinator's setting sessions.max_new_devices_per_host"
            )

    def add(self, connection: str, host: str) -> None:
        """Count a new device."""
        self._of_connection.add(connection)
        self._of_host.add(host)


class _Counts:
    """Counts by name, with a limit; beyond `_MAX_PEERS` names, those counted longest ago are dropped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts: dict[str, int] = {}

    def is_full(self, name: str) -> bool:
        return self._counts.get(name, 0) >= self.limit

    def add(self, name: str) -> None:
        self._counts[name] = self._counts.pop(name, 0) + 1
        if len(self._counts) > _MAX_REMEMBERED:
            del self._counts[next(iter(self._counts))]
