"""Which role may call which RPC: one table, checked before a servicer is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from coordinator.identity.callers import certificate_of
from coordinator.identity.live_calls import LiveCalls
from wattfleet_identity.certificate_check import CertificateCheck
from wattfleet_identity.http_access import VIEWING, AccessDeniedError
from wattfleet_identity.peers import Role

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
