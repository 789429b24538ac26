"""Invites, certificates and the audit log in the store, in SQLite and in PostgreSQL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta

from coordinator.state.identity_records import AuditEntry, CertificateRecord, ExpiredIdentities, InviteRecord
from coordinator.state.records import DeviceOverrides
from coordinator.store.store import Store
from tests.fakes.store_clock import StoreClock
from wattfleet_identity.invites import token_hash
from wattfleet_identity.peers import Peer, Role

HOUR = timedelta(hours=1)
KEEP = timedelta(days=400)
ORIN = Peer("lab", Role.DEVICE, "orin / ü", "agx-orin", "6f0c")


def an_invite(clock: StoreClock, token: str = "secret") -> InviteRecord:
    now = clock.now
    tags = frozenset({"b", "a"})
    return InviteRecord(token_hash(token), Role.DEVICE, "orin-3", "roof", tags, now, "operator anna", now + HOUR, 2)


def a_certificate(clock: StoreClock, serial: str = "1f") -> CertificateRecord:
    now = clock.now
    return CertificateRecord(serial, ORIN, "ab" * 32, now, now + 30 * HOUR, flower_key="ecdsa-sha2-nistp384 AAAA")


def entries(clock: StoreClock, count: int) -> list[AuditEntry]:
    return [
        AuditEntry(f"{number:x}", clock.now + number * HOUR, "operator anna", "SetBudget", f"watts={number}", "")
        for number in range(count)
    ]


def test_identities_come_back_in_their_newest_state(
    store: Store, reopen: Callable[[], Store], clock: StoreClock
) -> None:
    invite, certificate = an_invite(clock), a_certificate(clock)
    used = dataclasses.replace(invite, uses_left=0)
    revoked = dataclasses.replace(certificate, revoked_at=clock.now + HOUR, reason="stolen \0 ü")
    store.save(invite, certificate, a_certificate(clock, "2f"))
    store.save(used, revoked, DeviceOverrides("orin-3", frozenset({"a"}), supply="roof"))
    kept = reopen().load()
    assert kept.invites == [used]
    stored = dataclasses.replace(revoked, reason="stolen \ufffd ü")
    assert sorted(kept.certificates, key=lambda each: each.serial) == [stored, a_certificate(clock, "2f")]
    assert kept.overrides == [DeviceOverrides("orin-3", frozenset({"a"}), supply="roof")]


def test_the_audit_log_is_read_in_its_order_from_a_time_on(store: Store, clock: StoreClock) -> None:
    written = entries(clock, 5)
    store.save(*written[:3])
    store.save(*written[2:])
    assert store.audit_entries(None, 100) == written
    assert store.audit_entries(clock.now + 3 * HOUR, 100) == written[3:]
    assert store.audit_entries(None, 2) == written[3:], "the newest"


def test_what_has_expired_is_deleted(store: Store, reopen: Callable[[], Store], clock: StoreClock) -> None:
    other = dataclasses.replace(an_invite(clock, "other"), expires_at=clock.now + 2 * HOUR)
    late = dataclasses.replace(a_certificate(clock, "2f"), not_after=clock.now + 31 * HOUR)
    store.save(an_invite(clock), other, a_certificate(clock), late, *entries(clock, 3))
    store.save(ExpiredIdentities(clock.now + HOUR, KEEP, 100))
    assert store.load().invites == [other]
    store.save(ExpiredIdentities(clock.now + 30 * HOUR, KEEP, 100))
    kept = reopen().load()
    assert (kept.invites, kept.certificates) == ([], [late])


def test_the_audit_log_is_bounded_by_its_age_and_its_length(store: Store, clock: StoreClock) -> None:
    written = entries(clock, 6)
    store.save(*written)
    store.save(ExpiredIdentities(clock.now + 3 * HOUR, 2 * HOUR, 100))
    assert store.audit_entries(None, 100) == written[1:]
    store.save(ExpiredIdentities(clock.now, KEEP, 2))
    assert store.audit_entries(None, 100) == written[4:]
