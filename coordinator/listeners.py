"""The gRPC servers of a coordinator, one for each address. All have the same services, but different callers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from coordinator.identity.access import ANYBODY, Access, LiveCalls, ServerCredentials
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.services.audit import AuditLog
from coordinator.services.issuing import PublicAddresses
from coordinator.services.request_limits import STATUS, PeerQuotas, RequestLimits, RpcLatencies
from coordinator.settings import CoordinatorSettings
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.certificates import CertificateCheck
from wattfleet.common.identity.channels import is_loopback
from wattfleet.common.identity.http_access import VIEWING, AccessDeniedError
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.error_boundary import ErrorInterceptor
from wattfleet_proto.limits import MAX_MESSAGE_BYTES

OPTIONS = [
    # Otherwise a second coordinator would share the port instead of failing.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Bandwidth probing helps downloads over long distances, and takes a fifth of the time of a lease renewal.
    ("grpc.http2.bdp_probe", 0),
    # Ten thousand connections would each use memory for features that are not needed: channel statistics, header tables
    # and compression.
    ("grpc.enable_channelz", 0),
    ("grpc.http2.hpack_table_size.decoder", 0),
    ("grpc.http2.hpack_table_size.encoder", 0),
    ("grpc.per_message_compression", 0),
    # A connection that sends nothing at all is closed after this time; gRPC's default is 120 s.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # A connection whose client disappeared without closing it is closed after 80 s. Agents and clients with a call in
    # progress send something more often, so the coordinator does not ping them.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 30_000),
    # Clients ping every 10 s while they wait for an answer. By default, gRPC treats this as an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # When a large fleet reconnects, thousands of sessions begin within seconds. By default, gRPC cancels requests
    # beyond 1,000 pending ones and those that wait for 30 s; every cancelled request is then retried.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.server_max_unrequested_time_in_server", 120),
]

_FREE_CHECK_S = 0.2

_EVERY_ADDRESS = ("0.0.0.0", "[::]", "::")

_SERVED_BESIDE = frozenset({Role.DEVICE, Role.FLOWER, Role.SUPERLINK})
"""The roles served at the main address if operators have their own port, and at the plaintext address."""


@dataclass(frozen=True)
class Listener:
    """One address that is served.

    Attributes:
        name: its purpose.
        address: host:port; port 0 picks a free port.
        credentials: its TLS credentials; None for plaintext.
        access: which role may call which RPC; None permits everything to everybody.
    """

    name: str
    address: str
    credentials: grpc.ServerCredentials | None
    access: Access | None


def listeners_of(
    settings: CoordinatorSettings,
    credentials: ServerCredentials | None,
    is_revoked: Callable[[str], bool],
    calls: LiveCalls,
) -> list[Listener]:
    """The addresses that a coordinator listens on, the main address first.

    Args:
        settings: the addresses.
        credentials: the server's TLS credentials; None without an authority.
        is_revoked: returns whether the certificate with a serial number was revoked.
        calls: ends calls whose certificate becomes invalid.

    Raises:
        InvalidInputError: an address is malformed, needs an authority, or would serve plaintext to other machines.
    """
    main, identity, superlink = settings.server.address, settings.identity, settings.superlink.address
    if superlink is not None:
        split_address(superlink)
    if credentials is None:
        for address, option in (
            (identity.enrolment_address, "--enrolment-address"),
            (identity.operator_address, "--operator-address"),
            (identity.plaintext_address, "plaintext_address in [identity]"),
            (superlink, "--superlink-address"),
        ):
            if address is not None:
                raise InvalidInputError(f"{option} needs an authority: run `wattfleet coordinator init` first")
        return [Listener("main", main, None, None)]
    certificates = CertificateCheck(credentials.folder.authority.fleet, is_revoked)
    mutual = credentials.requiring_certificates

    def access(roles: frozenset[Role], plaintext_roles: frozenset[Role] | None = None) -> Access:
        return Access(certificates, roles, plaintext_roles, calls)

    operators = identity.operator_address
    enrolment = identity.enrolment_address or _port_after(main)
    found = [
        Listener("main", main, mutual(), access(ANYBODY if operators is None else _SERVED_BESIDE)),
        Listener("enrolment", enrolment, credentials.of_enrolment(), access(ANYBODY)),
    ]
    if operators is not None:
        found.append(Listener("operators", operators, mutual(), access(VIEWING)))
    if identity.plaintext_address is not None:
        found.append(Listener("plaintext", identity.plaintext_address, None, access(frozenset(), _SERVED_BESIDE)))
    return found


def authority_of(settings: CoordinatorSettings) -> AuthorityFolder | None:
    """Read the authority that a coordinator's settings name; None without one.

    Raises:
        InvalidInputError: it is damaged, or plaintext would be served to other machines although the settings do not
            allow it.
    """
    folder = settings.identity.directory
    authority = AuthorityFolder.open(folder) if AuthorityFolder.exists(folder) else None
    exposed = exposed_plaintext(settings, authority is not None)
    if exposed and not settings.identity.insecure:
        remedy = "leave out plaintext_address in [identity]" if authority else "run `wattfleet coordinator init`"
        raise InvalidInputError(
            f"{' and '.join(exposed)} would be plaintext, and other machines reach it: {remedy}, or pass --insecure"
        )
    return authority


def exposed_plaintext(settings: CoordinatorSettings, has_authority: bool) -> list[str]:
    """The addresses without TLS that other machines reach."""
    server = settings.server
    if has_authority:
        addresses = [settings.identity.plaintext_address]
    else:
        addresses = [server.address, server.http_address]
    return [each for each in addresses if each is not None and not is_loopback(split_address(each)[0])]


class Listeners:
    """Running gRPC servers."""

    def __init__(
        self,
        listeners: list[Listener],
        quotas: PeerQuotas,
        audit: AuditLog,
        latencies: RpcLatencies,
        add_services: Callable[[Any], None],
        idle_s: float,
    ) -> None:
        """Start no server yet.

        Args:
            listeners: the addresses, the main one first.
            quotas: the limits of all callers together.
            audit: logs what operators change.
            latencies: measures the duration of the RPCs.
            add_services: adds the services to a server.
            idle_s: close a connection without a request for this long.
        """
        self._addresses = [(each.name, each.address, each.credentials) for each in listeners]
        self._servers = []
        for each in listeners:
            server = grpc.aio.server(
                interceptors=[
                    latencies,
                    ErrorInterceptor(STATUS, _admission(quotas, each.access, audit)),
                    RequestLimits(),
                    audit,
                ],
                options=[*OPTIONS, ("grpc.max_connection_idle_ms", round(1e3 * idle_s))],
            )
            add_services(server)
            self._servers.append(server)

    async def start(self) -> dict[str, str]:
        """Start to listen, and return the bound addresses by name.

        Raises:
            InvalidInputError: an address is in use.
        """
        bound = {}
        for server, (name, address, credentials) in zip(self._servers, self._addresses, strict=True):
            host, port = split_address(address)
            try:
                if credentials is None:
                    taken = server.add_insecure_port(f"{host}:{port}")
                else:
                    taken = server.add_secure_port(f"{host}:{port}", credentials)
            except RuntimeError:
                raise in_use(address) from None
            bound[name] = f"{host}:{taken}"
            await server.start()
        return bound

    async def stop(self, grace_s: float) -> None:
        """Stop listening; open calls get the given time to finish."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


def public_addresses(settings: CoordinatorSettings, bound: Mapping[str, str]) -> PublicAddresses:
    """The addresses to announce to machines.

    Args:
        settings: the addresses as configured.
        bound: the bound addresses, by name.
    """
    main = settings.identity.public_address or bound["main"]
    host, port = split_address(main)
    if host in _EVERY_ADDRESS:
        host = socket.gethostname()

    def beside(name: str) -> str:
        return f"{host}:{split_address(bound[name])[1] if name in bound else port}"

    superlink = ":".join(map(str, split_address(settings.superlink.address))) if settings.superlink.address else ""
    return PublicAddresses(beside("enrolment"), f"{host}:{port}", beside("operators"), superlink)


def in_use(address: str) -> InvalidInputError:
    """Create the error for an address that cannot be bound."""
    return InvalidInputError(f"cannot listen on {address}: is another coordinator running? Choose another port")


def _port_after(address: str) -> str:
    host, port = split_address(address)
    return f"{host}:{port + 1 if port else 0}"


def _admission(quotas: PeerQuotas, access: Access | None, audit: AuditLog) -> Callable[[str, Any], Any]:
    if access is None:
        return quotas.admitted

    @contextmanager
    def admitted(method: str, context: Any) -> Iterator[None]:
        with ExitStack() as held:
            held.enter_context(quotas.admitted(method, context))
            try:
                held.enter_context(access.admitted(method, context))
            except AccessDeniedError as error:
                audit.denied(method, context, str(error))
                raise
            yield

    return admitted


def require_free(addresses: Iterable[str]) -> None:
    """Check that addresses are free, so that a start that cannot succeed fails before it changes anything.

    Raises:
        InvalidInputError: an address is in use or does not exist.
    """
    for address in addresses:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(split_address(address))
            except OSError:
                raise in_use(address) from None


async def await_free(addresses: Sequence[str], within_s: float) -> None:
    """Wait until addresses are free.

    Raises:
        InvalidInputError: an address is still in use after this time, or does not exist.
    """
    give_up_s = time.monotonic() + within_s
    while True:
        try:
            require_free(addresses)
            return
        except InvalidInputError:
            if time.monotonic() >= give_up_s:
                raise
        await asyncio.sleep(_FREE_CHECK_S)
