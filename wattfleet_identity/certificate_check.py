"""Checks whether a peer's certificate is valid for a fleet, also during long calls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from wattfleet.errors import WattfleetError
from wattfleet_identity.certificates import Certificate
from wattfleet_io.clock import utc_now


class InvalidCertificateError(WattfleetError):
    """The caller's certificate has expired, was revoked, or belongs to another fleet: enrol again."""


class CertificateCheck:
    """Checks the certificates of peers; TLS has checked their signatures already."""

    def __init__(
        self,
        fleet: str,
        is_revoked: Callable[[str], bool] = lambda serial: False,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Check certificates of one fleet.

        Args:
            fleet: the fleet that certificates must name.
            is_revoked: returns whether the certificate with a serial number was revoked.
            now: returns the time.
        """
        self._fleet = fleet
        self._is_revoked = is_revoked
        self._now = now

    def require_valid(self, certificate: Certificate) -> None:
        """Check that a certificate belongs to this fleet, has not expired and was not revoked.

        Raises:
            InvalidCertificateError: the certificate is not valid; the message states the remedy.
            UnknownPeerError: the certificate does not name a peer.
        """
        peer = certificate.peer
        if peer.fleet != self._fleet:
            raise InvalidCertificateError(
                f"the certificate belongs to the fleet {peer.fleet!r}, but this fleet is {self._fleet!r}: enrol with"
                " this coordinator"
            )
        self.require_still_valid(certificate)

    def require_still_valid(self, certificate: Certificate) -> None:
        """Check that a certificate that was valid has not expired or been revoked since.

        This is checked for every long call each second, so it must not parse the certificate's name.

        Raises:
            InvalidCertificateError: the certificate is no longer valid; the message states the remedy.
        """
        if certificate.not_after <= self._now():
            expired = f"expired on {certificate.not_after:%Y-%m-%d %H:%M} UTC"
            raise InvalidCertificateError(f"the certificate of {certificate.peer} {expired}: enrol again")
        if self._is_revoked(certificate.serial):
            raise InvalidCertificateError(f"the certificate of {certificate.peer} was revoked: enrol again")
