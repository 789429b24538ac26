"""The HTTP/2 frames (RFC 9113) that a gRPC client needs."""

from __future__ import annotations

from collections.abc import Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x01
END_HEADERS = 0x04
PADDED = 0x08
PRIORITY = 0x20

HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
"""Settings."""

DEFAULT_WINDOW = 65_535
"""Bytes that may be sent before the other side allows more."""

MAX_PAYLOAD = 16_384
"""Maximum bytes of a frame, unless the other side sets another maximum."""

HEAD_BYTES = 9


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Encode one frame."""
    return b"%b%c%c%b%b" % (len(payload).to_bytes(3, "big"), kind, flags, stream.to_bytes(4, "big"), payload)


def setting(name: int, value: int) -> bytes:
    """Encode one entry of a SETTINGS frame."""
    return name.to_bytes(2, "big") + value.to_bytes(4, "big")


def settings(payload: bytes) -> dict[int, int]:
    """Decode the entries of a SETTINGS frame."""
    return {
        int.from_bytes(payload[at : at + 2], "big"): int.from_bytes(payload[at + 2 : at + 6], "big")
        for at in range(0, len(payload), 6)
    }


class FrameReader:
    """Splits received bytes into frames."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def frames(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Add received bytes; yield kind, flags, stream and payload of every complete frame."""
        data = self._rest + data if self._rest else data
        begin, end = 0, len(data)
        while end - begin >= HEAD_BYTES:
            body = begin + HEAD_BYTES
            after = body + int.from_bytes(data[begin : begin + 3], "big")
            if after > end:
                break
            stream = int.from_bytes(data[begin + 5 : body], "big") & 0x7FFF_FFFF
            yield data[begin + 3], data[begin + 4], stream, data[body:after]
            begin = after
        self._rest = data[begin:]
