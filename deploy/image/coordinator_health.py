"""Exit 0 if the coordinator's gRPC health service reports SERVING; the argument is its address for enrolment.

Only this address answers without a certificate. The server's certificate is accepted without verification, since the
server runs in this container.
"""

from __future__ import annotations

import ssl
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from wattfleet.common.identity.authority import SERVER_NAME
from wattfleet.common.identity.channels import open_enrolment_channel

TIMEOUT_S = 5.0


def check(address: str) -> None:
    """Check the coordinator, or exit with an error."""
    host, _, port = address.rpartition(":")
    try:
        certificate = ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S).encode()
        with open_enrolment_channel(address, certificate, SERVER_NAME) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except OSError as error:
        sys.exit(f"{address}: {error}")
    except grpc.RpcError as error:
        sys.exit(f"{address}: {error.code().name}")  # type: ignore[attr-defined]  # gRPC errors are calls, too
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


if __name__ == "__main__":
    check(sys.argv[1])
