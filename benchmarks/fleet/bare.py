"""A bare grpc.aio server with the coordinator's methods, options and message sizes, and nothing behind them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.fleet import requests
from benchmarks.fleet.servers import HOST
from coordinator.server import BoundAddresses
from wattfleet.artefact import read_directory
from wattfleet_proto.v1 import session_pb2

ACK_BYTES = len(session_pb2.SessionResponse(ack=session_pb2.Ack(sequence=1)).SerializeToString())
_CHUNK_BYTES = 64 * 1024


async def serve(reference: Path, announce: Path) -> None:
    """Serve until ended.

    Args:
        reference: the predictor that is handed out.
        announce: where the address is written.
    """
    artefact = read_directory(reference)
    offsets = range(0, len(artefact.weights), _CHUNK_BYTES)
    chunks = [
        session_pb2.FetchReferenceResponse(weights_chunk=artefact.weights[at : at + _CHUNK_BYTES]).SerializeToString()
        for at in offsets
    ]

    async def session(said: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in said:
            yield message[:ACK_BYTES]

    async def fetch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    methods = {
        "Session": grpc.stream_stream_rpc_method_handler(session),
        "FetchReference": grpc.unary_stream_rpc_method_handler(fetch),
    }
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1024 * 1024)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(requests.SERVICE[1:], methods),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    BoundAddresses(f"{HOST}:{port}", "").announce(announce)
    await server.wait_for_termination()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet.bare", description=__doc__)
    parser.add_argument("--reference", type=Path, required=True, help="directory of a reference predictor")
    parser.add_argument("--announce", type=Path, required=True, help="file to write the address to")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.reference, arguments.announce))


if __name__ == "__main__":
    main()
