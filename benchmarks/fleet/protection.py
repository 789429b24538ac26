"""TLS for a simulated agent's connection.

asyncio's own TLS allocates 256 KiB for every connection, which is 2.6 GB for ten thousand agents.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from wattfleet.common.identity.authority import SERVER_NAME

_READ_BYTES = 16 * 1024


class Protected(asyncio.Transport, asyncio.Protocol):
    """Encrypts what a protocol writes, and decrypts what it receives.

    Args:
        protocol: the protocol to protect; connected once the handshake is over.
        context: TLS context with the agent's certificate and the trusted authorities.
    """

    __slots__ = ("_error", "_incoming", "_is_open", "_is_over", "_outgoing", "_protocol", "_tls", "_transport")

    def __init__(self, protocol: asyncio.Protocol, context: ssl.SSLContext) -> None:
        self._protocol = protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=SERVER_NAME)
        self._transport: asyncio.Transport | None = None
        self._is_open = False
        self._is_over = asyncio.Event()
        self._error: Exception | None = None

    async def handshake(self) -> None:
        """Wait until the handshake is over.

        Raises:
            OSError: the handshake failed.
        """
        await self._is_over.wait()
        if self._error is not None:
            raise self._error

    # --- the side of the network --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._shake()

    def data_received(self, data: bytes) -> None:
        """Continue the handshake, or decrypt data."""
        self._incoming.write(data)
        if not self._is_open and not self._shake():
            return
        try:
            while decrypted := self._tls.read(_READ_BYTES):
                self._protocol.data_received(decrypted)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        """End the protocol's connection, too."""
        self._transport = None
        if self._is_open:
            self._protocol.connection_lost(error)
        else:
            self._error = self._error or error or ConnectionResetError("connection lost in the handshake")
            self._is_over.set()

    # --- the side of the protocol -------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send."""
        self._tls.write(data)
        self._flush()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information from the connection's transport."""
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def _shake(self) -> bool:
        """Continue the handshake; return whether it is over."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._flush()
        self._is_open = True
        self._is_over.set()
        self._protocol.connection_made(self)
        return True

    def _fail(self, error: ssl.SSLError) -> None:
        self._error = error
        self.abort()

    def _flush(self) -> None:
        if self._transport is not None and self._outgoing.pending:
            self._transport.write(self._outgoing.read())
