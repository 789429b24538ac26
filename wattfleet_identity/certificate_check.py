"""Whether a peer's certificate is valid for a fleet, and for how long it stays so."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from wattfleet.errors import WattfleetError
from wattfleet_identity.certificates import Certificate
from wattfleet_io.clock import utc_now


class InvalidCertificateError(WattfleetError):
    """The caller's certificate has expired, was revoked or is of another fleet: enrol again."""


class CertificateCheck:
    """Checks the certificates of peers, whose signatures TLS has checked already."""

    def __init__(
        self,
        fleet: str,
        is_revoked: Callable[[str], bool] = lambda serial: False,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Check certificates of one fleet.

        Args:
            fleet: the fleet that certificates must name.
            is_revoked: whether a certificate was revoked, by its serial number.
            now: the time.
        """
        self._fleet = fleet
        self._is_revoked = is_revoked
        self._now = now

    def require_valid(self, certificate: Certificate) -> None:
        """Make sure that a certificate is of this fleet, has not expired and was not revoked.

        Raises:
            InvalidCertificateError: it is not valid; the text names the remedy.
            UnknownPeerError: it names no peer.
        """
        peer = certificate.peer
        if peer.fleet != self._fleet:
            raise InvalidCertificateError(
                f"the certificate is of the fleet {peer.fleet!r}, and this is {self._fleet!r}: enrol with this"
                " coordinator"
            )
        self.require_still_valid(certificate)

    def require_still_valid(self, certificate: Certificate) -> None:
        """Make sure that a certificate, which was valid, has not expired or been revoked since.

        This is checked for every lasting call each second, so it must not take the certificate's name apart.

        Raises:
            InvalidCertificateError: it is no longer valid; the text names the remedy.
        """
        if certificate.not_after <= self._now():
            expired = f"expired on {certificate.not_after:%Y-%m-%d %H:%M} UTC"
            raise InvalidCertificateError(f"the certificate of {certificate.peer} {expired}: enrol again")
        if self._is_revoked(certificate.serial):
            raise InvalidCertificateError(f"the certificate of {certificate.peer} was revoked: enrol again")
