"""Decides which references a device uses: those named by its coordinator and, with a trusted root, also signed.

While a reference is refused, the previously accepted ones stay in force.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.session.connection import Connect
from edge_agent.session.reference_trust import (
    CoordinatorAwayError,
    ReferenceStatus,
    ReferenceTrust,
    ReferenceUntrustedError,
    Refusal,
)
from edge_agent.session.references import ReferenceRefusedError, reference_of_digest
from reference_models import load, shipped
from wattfleet.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.prediction import Artefact
from wattfleet_io.backoff import Backoff
from wattfleet_io.console import plain_text
from wattfleet_proto.message_sizes import MAX_REASON_LENGTH

if TYPE_CHECKING:
    from edge_agent.session.signed_metadata import NamedTargets, SignedReference

_log = logging.getLogger(__name__)

_UNUSABLE = (CorruptReferenceError, ReferenceRefusedError)


class AcceptedReferences:
    """Fetches and checks references.

    Args:
        cache: folder with one sub-folder per digest.
        trust: what the device trusts.
        connect: opens a connection to the coordinator.
        timeout_s: limit on one request.
        retry_s: refused references are checked again after about this time, seconds.

    Attributes:
        refused: why references named by the coordinator are not used; empty while all are used.
    """

    def __init__(self, cache: Path, trust: ReferenceTrust, connect: Connect, timeout_s: float, retry_s: float) -> None:
        self._cache = cache
        self._trust = trust
        self._connect = connect
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._is_any_refused = asyncio.Event()
        self.refused = ""

    async def of(self, digests: Sequence[str]) -> list[Artefact]:
        """Return the references to transfer from, the most important first.

        If the first is refused, the references in force stay in use. Another one that cannot be used is left out. While
        the coordinator is unreachable, this waits for it, unless the references were accepted before.

        Args:
            digests: digests of the references that the coordinator names.

        Raises:
            CorruptReferenceError: the first cannot be used, and no reference was accepted before.
            ReferenceRefusedError: the coordinator refuses to send it, and no reference was accepted before.
            InvalidInputError: a reference cannot be written to the cache.
        """
        self._is_any_refused.clear()
        self.refused = ""
        if not self._trust.is_required:
            return await self._usable(digests, lambda _: None)
        try:
            return await self._checked(digests)
        except _UNUSABLE as error:
            return await self._in_force_instead(error)
        finally:
            if self.refused:
                self._is_any_refused.set()

    async def wait_until_accepted(self, digests: Sequence[str]) -> None:
        """Wait until all refused references are accepted.

        Args:
            digests: digests of the references that the coordinator names.
        """
        while True:
            await self._is_any_refused.wait()
            await asyncio.sleep(random.uniform(0.5, 1.0) * self._retry_s)
            in_force = self._status().digests
            with suppress(InvalidInputError, *_UNUSABLE):
                if _digests(await self._checked(digests)) != in_force:
                    return

    async def _checked(self, digests: Sequence[str]) -> list[Artefact]:
        """Return those references named by the coordinator that are signed, and put them in force."""
        before = self._status()
        if all(map(_is_shipped, digests)):
            references, checked_unix_s = await self._usable(digests, lambda _: None), before.checked_unix_s
        elif (targets := await self._targets(digests, before)) is None:
            return await self._usable(digests, lambda _: None)
        else:
            checked_unix_s = targets.checked_at.timestamp()
            # References that the operator no longer signs do not stay in force, either.
            named = tuple(each for each in before.digests if _is_shipped(each) or targets.names(each))
            self._note(ReferenceStatus(named, before.refused, checked_unix_s))
            references = await self._usable(
                digests, lambda digest: None if _is_shipped(digest) else targets.of_digest(digest)
            )
        self._note(ReferenceStatus(_digests(references), self.refused, checked_unix_s))
        return references

    async def _targets(self, digests: Sequence[str], before: ReferenceStatus) -> NamedTargets | None:
        """Return what is signed; None while the coordinator is unreachable, if the references were accepted before."""
        backoff, is_told = Backoff(), False
        while True:
            try:
                async with self._connect() as stub:
                    return await self._trust.targets(stub, self._timeout_s, before.checked_unix_s)
            except OSError as error:
                raise ReferenceUntrustedError(
                    f"{error.filename}: cannot be used: {error.strerror}", Refusal.DAMAGED
                ) from None
            except CoordinatorAwayError as error:
                if set(digests) <= set(before.digests):
                    return None
                if not is_told:
                    _log.warning("%s; retrying until it answers", error)
                    is_told = True
            await backoff.pause()

    async def _usable(
        self, digests: Sequence[str], signed_of: Callable[[str], SignedReference | None]
    ) -> list[Artefact]:
        """Fetch references; leave out one that cannot be used, unless it is the first."""
        references, problems = [], []
        for digest in digests:
            try:
                signed = signed_of(digest)
                references.append(
                    await reference_of_digest(digest, self._cache, self._connect, self._timeout_s, signed)
                )
            except _UNUSABLE as error:
                if not references:
                    raise
                problems.append(f"the reference {digest[:12]} is not used: {_shown(error)}")
                _log.error("%s", problems[-1])
        self.refused = "; ".join(problems)
        return references

    async def _in_force_instead(self, error: WattfleetError) -> list[Artefact]:
        """Return the references in force, to use instead of refused ones.

        Raises:
            WattfleetError: the error of the refusal, if no references are in force.
        """
        before, references = self._status(), []
        for digest in before.digests:
            with suppress(*_UNUSABLE):
                references.append(await reference_of_digest(digest, self._cache, self._connect, self._timeout_s))
        self.refused = f"the coordinator's reference is refused: {_shown(error)}"
        self._note(ReferenceStatus(before.digests, self.refused, before.checked_unix_s))
        if not references:
            raise error
        _log.error("%s; the reference %s stays in force", self.refused, references[0].digest[:12])
        return references

    def _status(self) -> ReferenceStatus:
        try:
            return self._trust.status
        except InvalidInputError as error:
            _log.error("%s", error)
            return ReferenceStatus()

    def _note(self, status: ReferenceStatus) -> None:
        try:
            self._trust.note(status)
        except OSError as error:
            _log.error("the references in force cannot be stored: %s", error)


@cache
def _is_shipped(digest: str) -> bool:
    """Return whether a reference ships with this package; such references are trusted."""
    return any(load(name).digest == digest for name in shipped())


def _digests(references: Sequence[Artefact]) -> tuple[str, ...]:
    return tuple(each.digest for each in references)


def _shown(error: Exception) -> str:
    return plain_text(str(error), MAX_REASON_LENGTH)
