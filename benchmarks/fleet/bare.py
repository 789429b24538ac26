"""A bare grpc.aio server that answers every message of a stream, or streams chunks, without any logic.

It imports nothing from Wattfleet, so its memory is that of gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc


async def serve(
    service: str,
    answer_bytes: int,
    chunks: int,
    chunk_bytes: int,
    options: list[tuple[str, int]],
    announce: Path,
    identity: Path | None,
) -> None:
    """Serve until the process ends.

    Args:
        service: name of the service whose methods it offers.
        answer_bytes: size of an answer in a session; this many bytes of the message are sent back.
        chunks: number of messages in a download.
        chunk_bytes: size of each message.
        options: gRPC options of the server.
        announce: file that the address is written to.
        identity: folder with the server's key, its certificate and the authorities that it trusts; None for plaintext.
    """
    chunk = bytes(chunk_bytes)

    async def session(said: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in said:
            yield message[:answer_bytes]

    async def fetch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(chunks):
            yield chunk

    methods = {
        "Session": grpc.stream_stream_rpc_method_handler(session),
        "FetchReference": grpc.unary_stream_rpc_method_handler(fetch),
    }
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    if identity is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        key, certificate, trusted = (
            (identity / name).read_bytes() for name in ("server.key", "server.pem", "trusted.pem")
        )
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], trusted, True))
    await server.start()
    draft = announce.with_suffix(".tmp")
    draft.write_text(json.dumps({"address": f"127.0.0.1:{port}"}))
    draft.replace(announce)
    await server.wait_for_termination()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet.bare",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--service", required=True, help="serve the methods of this service")
    parser.add_argument("--answer-bytes", type=int, required=True, help="set the size of an answer in a session")
    parser.add_argument("--chunks", type=int, required=True, help="set the number of messages in a download")
    parser.add_argument("--chunk-bytes", type=int, required=True, help="set the size of each message")
    parser.add_argument("--options", type=json.loads, required=True, help="set the server's options, as a JSON object")
    parser.add_argument("--identity", type=Path, help="require certificates of the authority in this folder")
    parser.add_argument("--announce", type=Path, required=True, help="write the address to this file")
    options = parser.parse_args()
    sizes = options.answer_bytes, options.chunks, options.chunk_bytes
    asyncio.run(serve(options.service, *sizes, list(options.options.items()), options.announce, options.identity))


if __name__ == "__main__":
    main()
