"""Keeps the certificates of a running SuperLink, and the SuperNodes and users that it accepts, up to date."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from logging import ERROR, INFO, WARNING

import httpx
from flwr.common import log

from wattfleet.common.clock import utc_now
from wattfleet.common.console import count_of
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.renewal import TIMEOUT_S, renew_if_due
from wattfleet.core.errors import WattfleetError
from wattfleet.flower.superlink.access import ControlAccess, EnrolmentList, NodeRegistry, StoredList, flower_key
from wattfleet.flower.superlink.server_certificate import ServerCertificate, WatchedFiles, superlink_service
from wattfleet_proto.v1 import superlink_pb2

_LONGEST_PAUSE_S = 30.0
_COMPARE_EVERY = 15
"""Checks without a change after which the registered SuperNodes are compared anyway: `flwr` can change them, too."""


class Keeper:
    """Polls the coordinator, and applies what has changed.

    Args:
        endpoint: the coordinator, and the folder with the identity.
        certificate: the SuperLink's TLS certificate, or the files of a certificate that the user provides.
        access: the access control of the Control API.
        registry: the registered SuperNodes.
        stored: the stored list, for a start while the coordinator is away.
        reload_tls: makes the next connections use the new certificate.
        every_s: seconds between two checks as long as nothing fails.
        now: returns the current time.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        certificate: ServerCertificate | WatchedFiles,
        access: ControlAccess,
        registry: NodeRegistry,
        stored: StoredList,
        reload_tls: Callable[[], None],
        every_s: float,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._endpoint = endpoint
        self._certificate = certificate
        self._access = access
        self._registry = registry
        self._stored = stored
        self._now = now
        self._reload_tls = reload_tls
        self._every_s = every_s
        self._pause_s = every_s
        self._revision = ""
        self._enrolled: dict[bytes, str] = {}
        self._is_known = self._is_confirmed = False
        self._checks_left = 0
        self._authority = b""
        self._problems: dict[str, str] = {}

    def restore(self) -> None:
        """Use the stored list until the coordinator answers."""
        try:
            found = self._stored.read()
            if found is not None:
                self._apply(found[0])
        except (WattfleetError, ValueError) as error:  # ValueError: a key in the list cannot be read
            log(WARNING, "wattfleet-superlink: no revocation is known until the coordinator answers: %s", error)
            return
        if found is None:
            log(INFO, "wattfleet-superlink: no revocation is known until the coordinator answers: no list is stored")
            return
        enrolled, at = found
        log(
            INFO,
            "wattfleet-superlink: until the coordinator answers, its list from %s UTC is used, which is %s old: %s"
            " and %s",
            f"{at:%Y-%m-%d %H:%M}",
            _age_text((self._now() - at).total_seconds()),
            count_of(len(enrolled.supernodes), "SuperNode"),
            count_of(len(enrolled.revoked), "revoked certificate"),
        )

    def is_not_enrolled(self, key: bytes) -> bool:
        """Whether a SuperNode's key is not on the list that the coordinator has sent since this SuperLink started.

        Args:
            key: the public key in PEM.
        """
        return self._is_confirmed and key not in self._enrolled

    def run(self) -> None:
        """Check repeatedly until the process ends. The pauses grow while something fails."""
        while True:
            time.sleep(self.check())

    def check(self) -> float:
        """Check once, and return the seconds until the next check."""
        steps = (self._fetch_list, self._register, self._renew_identity, self._renew_certificate)
        is_well = all([self._succeeds(step) for step in steps])
        self._pause_s = self._every_s if is_well else min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        return self._pause_s

    def _succeeds(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except Exception:
            # Whatever failed, later revocations must still be applied.
            log(ERROR, "wattfleet-superlink: an unexpected error; trying again", exc_info=True)
            return False

    def _fetch_list(self) -> bool:
        """Request the enrolled SuperNodes and revoked users from the coordinator; return whether it answered."""
        try:
            with superlink_service(self._endpoint) as stub:
                request = superlink_pb2.ListSuperNodesRequest(known_revision=self._revision)
                parts = list(stub.ListSuperNodes(request, timeout=TIMEOUT_S))
        except CoordinatorUnreachableError as error:
            return self._note("coordinator", f"{error}. The registered SuperNodes stay as they are; trying again")
        except WattfleetError as error:
            return self._note("coordinator", f"the coordinator does not report which SuperNodes are enrolled: {error}")
        first = parts[0]
        self._authority = first.authority
        enrolled = None
        if not first.is_unchanged:
            supernodes = {view.public_key: view.device_id for part in parts for view in part.supernodes}
            enrolled = EnrolmentList(supernodes, tuple(first.revoked_serials))
            self._apply(enrolled)
            self._revision, self._is_confirmed = first.revision, True
        self._store(enrolled)
        return self._settled("coordinator", "the coordinator answers again")

    def _apply(self, enrolled: EnrolmentList) -> None:
        """Refuse the revoked certificates, and have the SuperNodes registered in the next step."""
        self._access.revoke(enrolled.revoked)
        self._enrolled = {flower_key(key): device_id for key, device_id in enrolled.supernodes.items()}
        self._is_known, self._checks_left = True, 0

    def _store(self, enrolled: EnrolmentList | None) -> None:
        """Store a list; None records that the stored one is still valid."""
        try:
            if enrolled is None:
                self._stored.confirm(self._now())
            else:
                self._stored.write(enrolled, self._now())
        except OSError as error:
            self._note("list", f"the list of revocations cannot be stored for the next start: {error}")
        else:
            self._settled("list", "the list of revocations is stored again")

    def _register(self) -> bool:
        """Register and unregister SuperNodes; return whether the SuperLink now has those that are enrolled."""
        if not self._is_known:
            return True
        if self._checks_left:
            self._checks_left -= 1
            return True
        try:
            self._registry.synchronise(self._enrolled)
        except httpx.HTTPError as error:
            return self._note("registry", f"the SuperLink's own Control API does not answer yet: {error}; trying again")
        self._checks_left = _COMPARE_EVERY
        return self._settled("registry", "the enrolled SuperNodes are registered")

    def _renew_identity(self) -> bool:
        try:
            problem = renew_if_due(self._endpoint)
        except WattfleetError as error:
            problem = str(error)
        return self._note("identity", problem) if problem else self._settled("identity", "the identity was renewed")

    def _renew_certificate(self) -> bool:
        if isinstance(self._certificate, WatchedFiles):
            return self._use_replaced(self._certificate)
        if not self._authority:
            return True
        try:
            if not self._certificate.is_due(self._authority):
                return True
            self._certificate.renew()
            self._reload_tls()
        except (OSError, WattfleetError) as error:
            return self._note("certificate", f"the SuperLink's TLS certificate could not be renewed: {error}")
        log(INFO, "The SuperLink's TLS certificate was renewed")
        return self._settled("certificate", "")

    def _use_replaced(self, files: WatchedFiles) -> bool:
        try:
            if (state := files.replaced()) is None:
                return self._settled("certificate", "the TLS files match those in use again")
            self._reload_tls()
        except OSError as error:
            problem = f"the replaced TLS files cannot be used: {error}. The earlier ones stay in use; trying again"
            return self._note("certificate", problem)
        files.use(state)
        self._settled("certificate", "")
        log(INFO, "The TLS files were replaced. New connections use them")
        return True

    def _note(self, what: str, problem: str) -> bool:
        if self._problems.get(what) != problem:
            log(WARNING, "wattfleet-superlink: %s", problem)
        self._problems[what] = problem
        return False

    def _settled(self, what: str, news: str) -> bool:
        if self._problems.pop(what, "") and news:
            log(INFO, "wattfleet-superlink: %s", news)
        return True


def _age_text(seconds: float) -> str:
    """Return an age as text, such as "3 h"."""
    for unit, unit_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
