"""Which role may call which RPC: one table, checked before a servicer is called."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import grpc

from coordinator.errors import ForeignDeviceError
from coordinator.identity.authority_folder import SERVER_LIFETIME, AuthorityFolder
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.certificates import Certificate, CertificateCheck, InvalidCertificateError
from wattfleet.common.identity.http_access import VIEWING, AccessDeniedError
from wattfleet.common.identity.peers import Role
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)


# --- Callers ----------------------------------------------------------------------------------------------------------
# The caller of an RPC, according to the certificate of the connection.


_read = lru_cache(maxsize=4096)(Certificate.from_pem)


def certificate_of(context: Any) -> Certificate | None:
    """The certificate of a caller's connection, verified by TLS; None without one.

    Args:
        context: gRPC's context of the call.
    """
    pem = context.auth_context().get("x509_pem_cert")
    return _read(pem[0]) if pem else None


def peer_of(context: Any) -> str:
    """The id in a caller's certificate; empty without one."""
    certificate = certificate_of(context)
    return "" if certificate is None else certificate.uri


# --- Live calls -------------------------------------------------------------------------------------------------------
# Long calls in progress and their certificates, which TLS checks only at handshakes.

Check = Callable[[Certificate], None]
"""Raises an `InvalidCertificateError` if a certificate is no longer valid."""


class LiveCalls:
    """Ends the calls whose certificate has expired or was revoked."""

    def __init__(self) -> None:
        """Start without any call."""
        self._calls: dict[asyncio.Task[object], tuple[Certificate, Check]] = {}
        self._ended: dict[asyncio.Task[object], InvalidCertificateError] = {}

    @contextmanager
    def holding(self, certificate: Certificate, require_valid: Check) -> Iterator[None]:
        """Register a call of the current task while it is in progress.

        Args:
            certificate: the caller's certificate.
            require_valid: checks it.

        Raises:
            InvalidCertificateError: the certificate became invalid during the call.
        """
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._calls[task] = certificate, require_valid
        try:
            yield
        except asyncio.CancelledError:
            if (why := self._ended.get(task)) is None:
                raise  # the caller has disconnected
            task.uncancel()
            raise why from None
        finally:
            self._calls.pop(task, None)
            self._ended.pop(task, None)

    def end_invalid(self) -> int:
        """End the calls whose certificate is no longer valid, and return their number."""
        before = len(self._ended)
        for task, (certificate, require_valid) in self._calls.items():
            if task in self._ended:
                continue
            try:
                require_valid(certificate)
            except InvalidCertificateError as error:
                self._ended[task] = error
                task.cancel()
        return len(self._ended) - before

    async def keep_ending(self, every_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """End calls whose certificate expires or is revoked, until cancelled."""
        while True:
            await sleep(every_s)
            self.end_invalid()


# --- Access -----------------------------------------------------------------------------------------------------------

ANYBODY = frozenset(Role)
_SESSION = frozenset({Role.DEVICE})
_PLANNING = frozenset({Role.FLOWER, Role.SUPERLINK})  # a SuperLink runs the ServerApps of others
_SUPERLINK = frozenset({Role.SUPERLINK})
_OPERATING = frozenset({Role.OPERATOR})

_OF_SERVICES: Mapping[str, tuple[frozenset[Role], tuple[str, ...]]] = {
    "wattfleet.v1.SessionService": (_SESSION, ("Session", "FetchReference", "FetchMetadata")),
    "wattfleet.v1.PlanningService": (
        _PLANNING,
        (
            "StartRun",
            "ResolveNodes",
            "BindNodes",
            "PlanRound",
            "PlanMeasuring",
            "GetPlan",
            "FinishRound",
            "ReportUnplannedRound",
            "PredictNodes",
            "ReportMetrics",
            "FinishRun",
        ),
    ),
    "wattfleet.v1.ViewService": (
        VIEWING,
        ("GetFleet", "ListDevices", "ListNodes", "ListRuns", "ListWorkloads", "StreamRounds", "ListEvents"),
    ),
    "wattfleet.v1.OperatorService": (
        _OPERATING,
        (
            "SetBudget",
            "ClearBudget",
            "SetCharge",
            "TagDevices",
            "DrainDevices",
            "ProfileWorkload",
            "ForgetDevices",
            "DeleteRuns",
            "PublishReference",
            "RemoveReference",
            "PinReference",
            "PublishMetadata",
        ),
    ),
    "wattfleet.v1.IdentityService": (
        _OPERATING,
        (
            "Invite",
            "ListInvites",
            "CancelInvite",
            "ListCertificates",
            "IssueCertificate",
            "RevokeCertificates",
            "BeginRotation",
            "FinishRotation",
            "ReadAuditLog",
        ),
    ),
    "wattfleet.v1.SuperLinkService": (_SUPERLINK, ("IssueServerCertificate", "ListSuperNodes")),
    "wattfleet.v1.EnrolmentService": (ANYBODY, ("GetAuthority", "Join", "Renew")),
    "grpc.health.v1.Health": (ANYBODY, ("Check", "Watch")),
    "grpc.reflection.v1alpha.ServerReflection": (VIEWING, ("ServerReflectionInfo",)),
}
_OF_METHODS: Mapping[str, frozenset[Role]] = {
    # These change nothing.
    "/wattfleet.v1.OperatorService/PreviewPlan": VIEWING,
    "/wattfleet.v1.OperatorService/GetBudgets": VIEWING,
    "/wattfleet.v1.OperatorService/GetBatteries": VIEWING,
    "/wattfleet.v1.OperatorService/ListReferences": VIEWING,
    "/wattfleet.v1.OperatorService/GetMetadata": VIEWING,
    "/wattfleet.v1.SuperLinkService/GetSuperLink": ANYBODY,
}

ROLES: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        **{f"/{service}/{name}": roles for service, (roles, names) in _OF_SERVICES.items() for name in names},
        **_OF_METHODS,
    }
)
"""The roles that may call each RPC, by its full name. Nobody may call an RPC that is missing here."""

WITHOUT_CERTIFICATE = frozenset(
    {
        "/wattfleet.v1.EnrolmentService/GetAuthority",
        "/wattfleet.v1.EnrolmentService/Join",
        "/grpc.health.v1.Health/Check",
    }
)
"""The RPCs that a caller may use before it has a certificate."""

_NEVER_IN_PLAINTEXT = frozenset(
    {
        "/wattfleet.v1.SuperLinkService/IssueServerCertificate",
        "/wattfleet.v1.SuperLinkService/ListSuperNodes",
    }
)
"""RPCs that need a certificate even while a fleet moves to certificates: their answers remain useful afterwards."""

STREAMS = frozenset(
    {
        "/wattfleet.v1.SessionService/Session",
        "/wattfleet.v1.SessionService/FetchReference",
        "/wattfleet.v1.ViewService/ListDevices",
        "/wattfleet.v1.ViewService/ListNodes",
        "/wattfleet.v1.ViewService/ListRuns",
        "/wattfleet.v1.ViewService/ListWorkloads",
        "/wattfleet.v1.ViewService/StreamRounds",
        "/wattfleet.v1.ViewService/ListEvents",
        "/wattfleet.v1.OperatorService/DeleteRuns",
        "/wattfleet.v1.OperatorService/PublishReference",
        "/wattfleet.v1.IdentityService/ListCertificates",
        "/wattfleet.v1.IdentityService/ReadAuditLog",
        "/wattfleet.v1.SuperLinkService/ListSuperNodes",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""The streaming RPCs. They may last long, and end with the caller's certificate."""


class Access:
    """Lets callers use the RPCs of their role.

    Attributes:
        certificates: checks whether a caller's certificate is valid.
    """

    def __init__(
        self,
        certificates: CertificateCheck,
        roles: frozenset[Role] = ANYBODY,
        plaintext_roles: frozenset[Role] | None = None,
        calls: LiveCalls | None = None,
    ) -> None:
        """Guard one address.

        Args:
            certificates: checks whether a caller's certificate is valid.
            roles: the roles that this address serves.
            plaintext_roles: the roles of a caller without TLS; None if every caller has TLS.
            calls: ends calls whose certificate becomes invalid; None creates a new one.
        """
        self.certificates = certificates
        self._roles = roles
        self._plaintext_roles = plaintext_roles
        self._calls = calls or LiveCalls()

    @contextmanager
    def admitted(self, method: str, context: Any) -> Iterator[None]:
        """Check a caller before and during its call.

        Raises:
            AccessDeniedError: its role may not call the method, or not at this address.
            InvalidCertificateError: its certificate has expired, was revoked, or belongs to another fleet.
            UnknownPeerError: its certificate does not name a peer.
        """
        certificate = certificate_of(context)
        allowed = ROLES.get(method, frozenset())
        if certificate is not None:
            self.certificates.require_valid(certificate)
            role = certificate.peer.role
            if role not in allowed:
                raise AccessDeniedError(
                    f"a certificate of the role {role.value} may not call {method}: use one of the role"
                    f" {' or '.join(sorted(each.value for each in allowed)) or '(nobody may call it)'}"
                )
            if role not in self._roles:
                raise AccessDeniedError(
                    f"this address does not serve the role {role.value}: use the address for operators"
                )
        elif self._plaintext_roles is not None:
            if method in _NEVER_IN_PLAINTEXT or not allowed & self._plaintext_roles:
                raise AccessDeniedError(f"{method} needs a certificate: use the address with TLS")
        elif method not in WITHOUT_CERTIFICATE:
            raise AccessDeniedError(
                f"{method} needs a certificate: enrol this machine first, then use the main address"
            )
        if certificate is None or method not in STREAMS:
            yield
            return
        with self._calls.holding(certificate, self.certificates.require_still_valid):
            yield


# --- Certified device -------------------------------------------------------------------------------------------------
# Checks that the agent that begins a session is the device of its certificate.


def require_own(
    hello: session_pb2.Hello, certificate: Certificate | None, has_certificate: Callable[[str], bool]
) -> None:
    """Check that a device is the one that its certificate names.

    Args:
        hello: the session's first message.
        certificate: the certificate of the connection; None on plaintext.
        has_certificate: returns whether the device with an id has a valid certificate.

    Raises:
        ForeignDeviceError: the certificate belongs to another device, or the device has one and does not use it.
    """
    if certificate is None:
        if has_certificate(hello.device_id):
            raise ForeignDeviceError(
                f"{hello.device_id} has a certificate: its agent must use it, at the coordinator's address with TLS"
            )
        return
    peer = certificate.peer
    for what, claimed, certified in (
        ("device", hello.device_id, peer.name),
        ("board", hello.board, peer.board),
        ("installation", hello.installation, peer.installation),
    ):
        if certified and claimed != certified:
            raise ForeignDeviceError(
                f"{hello.device_id}: the certificate is for the {what} {certified!r}, not {claimed!r}: enrol this"
                " device with `wattfleet agent join`"
            )


# --- Server credentials -----------------------------------------------------------------------------------------------
# The server's TLS credentials, whose certificate changes without a restart.
#
# gRPC requests the configuration at every handshake. A process with such credentials must not fork, because gRPC's
# threads hold locks that the child would wait for. Children are started with `exec`
# (`wattfleet/common/child_process.py`).

_CHECK_S = 3600.0


class ServerCredentials:
    """The credentials of all addresses with TLS, and the folder from which they are read."""

    def __init__(self, folder: AuthorityFolder, now: Callable[[], datetime] = utc_now) -> None:
        """Use a folder's certificate.

        Args:
            folder: the authority and the server's certificate.
            now: returns the time.
        """
        self.folder = folder
        self._now = now

    def requiring_certificates(self) -> grpc.ServerCredentials:
        """Credentials of an address whose clients must have a certificate."""
        return self._credentials(require=True)

    def of_enrolment(self) -> grpc.ServerCredentials:
        """Credentials of an address whose clients have no certificate yet."""
        return self._credentials(require=False)

    def replace(self, folder: AuthorityFolder) -> None:
        """Use another certificate or other authorities, beginning with the next handshake."""
        self.folder = folder

    def read_again(self) -> None:
        """Read the folder again, and use its current contents.

        Raises:
            InvalidInputError: the folder is damaged.
        """
        self.replace(AuthorityFolder.open(self.folder.folder))

    def renew_if_due(self) -> bool:
        """Issue the next certificate after two thirds of the current one's validity; return whether one was issued.

        Raises:
            OSError: the folder cannot be written; the current certificate stays in use.
        """
        server = self.folder.server
        if self._now() < server.renew_at(server.not_after - SERVER_LIFETIME):
            return False
        self.folder = self.folder.with_new_server(self._now())
        return True

    async def keep_renewed(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Renew the certificate when it is due, until cancelled."""
        while True:
            try:
                if self.renew_if_due():
                    _log.info("the coordinator's certificate was renewed")
            except OSError as error:
                _log.warning(
                    "the coordinator's certificate cannot be renewed: %s. It expires on %s; repair the folder %s",
                    error.strerror,
                    f"{self.folder.server.not_after:%Y-%m-%d}",
                    self.folder.folder,
                )
            await sleep(_CHECK_S)

    def _credentials(self, require: bool) -> grpc.ServerCredentials:
        used = self.folder

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """The configuration for a handshake; None if that of the previous handshake is still right."""
            nonlocal used
            if self.folder is used:
                return None
            used = self.folder
            return _configuration(used, require)

        fetch: Any = changed  # the stubs omit that it may return None
        return grpc.dynamic_ssl_server_credentials(_configuration(used, require), fetch, require)


def _configuration(folder: AuthorityFolder, require: bool) -> grpc.ServerCertificateConfiguration:
    pair = [(folder.server_key_pem, folder.server_pem)]
    return grpc.ssl_server_certificate_configuration(pair, folder.trusted_pem if require else None)
