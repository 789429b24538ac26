"""Create an invite for each machine of the fleet that is not enrolled, and a certificate for Prometheus.

It runs with the operator's identity at every start of the fleet. Enrolled machines are not changed.

    python make_invites.py --coordinator coordinator:7070 --invites DIR --prometheus DIR superlink:superlink
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from coordinator.cli.client import CoordinatorClient, RequestFailedError
from wattfleet.common.addresses import OPERATOR_FOLDER
from wattfleet.common.atomic_files import replace_file
from wattfleet.common.clock import utc_now
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.certificates import Certificate, new_key, request_certificate
from wattfleet.common.identity.channels import Endpoint, require_identity
from wattfleet.common.identity.identity_folder import CERTIFICATE, KEY, TRUSTED, Identity, write_identity
from wattfleet.common.identity.renewal import renew_if_due, stored_at
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.v1 import identity_pb2

INVITE_TTL_S = 3600.0
PROMETHEUS_LIFETIME_S = 365 * 86400.0
"""The share of its validity after which this script renews the certificate of Prometheus, which cannot do so itself."""


def make_invites(client: CoordinatorClient, machines: Iterable[tuple[str, str]], folder: Path) -> list[str]:
    """Write an invite for each machine without a valid certificate, and return the names of these machines.

    Args:
        client: the operator's client of the coordinator.
        machines: role and name of each machine.
        folder: folder for the invites, each in a file with the machine's name. Files of enrolled machines are deleted.
    """
    enrolled = {(each.role, each.name) for each in client.certificates() if not each.HasField("revoked_unix_s")}
    unused = client.administer("ListInvites", identity_pb2.ListInvitesRequest()).invites
    invited = []
    for role, name in machines:
        for earlier in unused:
            if (earlier.role, earlier.name) == (role, name):
                client.administer("CancelInvite", identity_pb2.CancelInviteRequest(number=earlier.number))
        if (role, name) in enrolled:
            (folder / name).unlink(missing_ok=True)
            continue
        request = identity_pb2.InviteRequest(role=role, name=name, uses=1, ttl_s=INVITE_TTL_S)
        line: str = client.administer("Invite", request).line
        replace_file(folder / name, f"{line}\n".encode(), mode=0o600)
        invited.append(name)
    return invited


def make_prometheus_certificate(client: CoordinatorClient, folder: Path, trusted_pem: bytes) -> bool:
    """Create a viewer's certificate for Prometheus if it has none or it is due; return whether it was created.

    Args:
        client: the operator's client of the coordinator.
        folder: folder for the certificate. Prometheus runs as another user of the same group.
        trusted_pem: the authorities in force.
    """
    if _is_current(folder, trusted_pem):
        return False
    key_pem = new_key()
    request = identity_pb2.IssueCertificateRequest(
        request_pem=request_certificate(key_pem), role="viewer", name="prometheus", lifetime_s=PROMETHEUS_LIFETIME_S
    )
    answer = client.administer("IssueCertificate", request)
    write_identity(folder, Identity(key_pem, answer.certificate_pem, answer.trusted_pem))
    os.chmod(folder / KEY, 0o640)
    os.chmod(folder, 0o750)
    return True


def _is_current(folder: Path, trusted_pem: bytes) -> bool:
    try:
        certificate = Certificate.from_pem((folder / CERTIFICATE).read_bytes())
        return (folder / TRUSTED).read_bytes() == trusted_pem and utc_now() < certificate.renew_at(stored_at(folder))
    except (OSError, InvalidInputError):
        return False


def main() -> None:
    """Create what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, help="host:port of the coordinator")
    parser.add_argument("--invites", required=True, type=Path, help="folder for the invites")
    parser.add_argument("--prometheus", required=True, type=Path, help="folder for the certificate of Prometheus")
    parser.add_argument("machines", nargs="+", help="role:name of each machine, such as device:orin-0")
    arguments = parser.parse_args()
    machines = [(role, name) for role, _, name in (each.partition(":") for each in arguments.machines)]
    try:
        endpoint = Endpoint.of(arguments.coordinator, OPERATOR_FOLDER)
        if (problem := renew_if_due(endpoint)) is not None:
            print(f"warning: {problem}", flush=True)
        with CoordinatorClient(endpoint) as client:
            invited = make_invites(client, machines, arguments.invites)
            trusted_pem = require_identity(OPERATOR_FOLDER).trusted_pem
            is_new = make_prometheus_certificate(client, arguments.prometheus, trusted_pem)
    except (CoordinatorUnreachableError, InvalidInputError, RequestFailedError, OSError) as error:
        sys.exit(f"the coordinator at {arguments.coordinator}: {error}")
    print(f"invited: {', '.join(invited) or 'nobody, since all are enrolled'}")
    print(f"the certificate of Prometheus is {'new' if is_new else 'as before'}")


if __name__ == "__main__":
    main()
