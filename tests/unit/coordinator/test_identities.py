"""Admission to the fleet: an invite works as often as it states, and a revoked certificate is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.errors import (
    AlreadyEnrolledError,
    ExpiredInviteError,
    InvalidInviteError,
    QuotaExceededError,
    UnknownInviteError,
    UnknownRecordError,
    UsedUpInviteError,
)
from coordinator.state.identities import Identities
from coordinator.state.identity_records import MAX_TTL, MAX_USES, Admission, Application, CertificateRecord, Terms
from wattfleet.common.identity.invites import token_hash
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.errors import InvalidInputError

NOW = datetime(2026, 11, 24, tzinfo=timezone.utc)
MONTH = timedelta(days=30)
FLEET = "lab"
ORIN = Application("orin-3", "agx-orin", "6f0c")


class Enrolling:
    """Identities, and a counter for serial numbers."""

    def __init__(self) -> None:
        self.identities = Identities()
        self.count = 0

    def invite(self, token: str, now: datetime = NOW, **terms: object) -> None:
        self.identities.invite(token, Terms(**terms), "operator anna", now)  # type: ignore[arg-type]

    def redeem(self, token: str, application: Application = ORIN, now: datetime = NOW) -> Admission:
        admission = self.identities.redeem(token, application, FLEET, now)
        self.issue(admission.peer, now, flower_key=application.flower_key)
        self.identities.admitted(admission)
        return admission

    def unstored(self, token: str, application: Application = ORIN) -> Callable[[], object]:
        """Enrol a machine whose enrolment is not stored yet; returns a function that undoes it."""
        admission = self.identities.redeem(token, application, FLEET, NOW)
        record = self.issue(admission.peer)
        return lambda: self.identities.take_back(admission, record, NOW)

    def issue(self, peer: Peer, now: datetime = NOW, issuer: str = "old", flower_key: str = "") -> CertificateRecord:
        self.count += 1
        record = CertificateRecord(f"{self.count:x}", peer, issuer, now, now + MONTH, flower_key=flower_key)
        return self.identities.issued(record)

    def valid(self, now: datetime = NOW) -> list[str]:
        return [each.serial for each in self.identities.certificates(now) if each.revoked_at is None]


@given(
    uses=st.integers(1, 5),
    ttl_s=st.integers(1, 100),
    attempts_s=st.lists(st.integers(0, 120), max_size=12).map(sorted),
)
def test_an_invite_is_used_as_often_as_it_says_and_no_later(uses: int, ttl_s: int, attempts_s: list[int]) -> None:
    enrolling = Enrolling()
    enrolling.invite("secret", uses=uses, ttl=timedelta(seconds=ttl_s))
    enrolled = 0
    for number, after_s in enumerate(attempts_s):
        now = NOW + timedelta(seconds=after_s)
        try:
            enrolling.redeem("secret", Application(f"device-{number}"), now)
        except ExpiredInviteError:
            assert after_s >= ttl_s
        except UsedUpInviteError:
            assert enrolled == uses and after_s < ttl_s
        else:
            enrolled += 1
            assert after_s < ttl_s
    assert enrolled == min(uses, sum(after_s < ttl_s for after_s in attempts_s))


def test_a_guess_does_not_learn_why_a_token_is_refused() -> None:
    enrolling = Enrolling()
    enrolling.invite("used")
    enrolling.invite("old", ttl=timedelta(minutes=1))
    enrolling.invite("closed")
    enrolling.identities.cancel(token_hash("closed")[:12])
    enrolling.redeem("used")
    texts = set()
    for token, kind in (
        ("used", UsedUpInviteError),
        ("old", ExpiredInviteError),
        ("closed", UsedUpInviteError),
        ("guessed", UnknownInviteError),
        ("", UnknownInviteError),
    ):
        with pytest.raises(InvalidInviteError) as refused:
            enrolling.redeem(token, now=NOW + timedelta(minutes=2))
        assert type(refused.value) is kind
        texts.add(str(refused.value))
    assert len(texts) == 1


def test_a_device_is_named_by_its_invite_or_else_by_itself() -> None:
    enrolling = Enrolling()
    enrolling.invite("any", uses=2)
    enrolling.invite("one", name="roof-1")
    assert enrolling.redeem("any").peer == Peer(FLEET, Role.DEVICE, "orin-3", "agx-orin", "6f0c")
    assert enrolling.redeem("one").peer.name == "roof-1"
    with pytest.raises(InvalidInputError, match="a device id"):
        enrolling.redeem("any", Application())
    assert [each.uses_left for each in enrolling.identities.invites(NOW)] == [1], "a refused machine uses nothing up"


def test_others_are_named_by_their_invite_only() -> None:
    enrolling = Enrolling()
    enrolling.invite("app", role=Role.FLOWER, name="trainer")
    assert enrolling.redeem("app").peer == Peer(FLEET, Role.FLOWER, "trainer")


@pytest.mark.parametrize(
    "terms",
    [
        {"role": Role.OPERATOR},
        {"role": Role.VIEWER, "name": "grafana", "site": "roof"},
        {"role": Role.FLOWER, "name": "app", "tags": frozenset({"lab"})},
        {"name": "orin\n3"},
        {"tags": frozenset({"two words"})},
        {"tags": frozenset(map(str, range(21)))},
        {"uses": 0},
        {"uses": MAX_USES + 1},
        {"name": "orin-3", "uses": 2},
        {"ttl": timedelta(0)},
        {"ttl": MAX_TTL + timedelta(seconds=1)},
    ],
)
def test_terms_that_cannot_be_meant_are_refused(terms: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        Terms(**terms)  # type: ignore[arg-type]


# --- one machine for each device id -------------------------------------------------------------------------------


def test_another_machine_cannot_take_a_devices_id() -> None:
    enrolling = Enrolling()
    enrolling.invite("two", uses=3)
    enrolling.redeem("two")
    impostor = Application("orin-3", "agx-orin", "beef")
    with pytest.raises(AlreadyEnrolledError, match="invite --device orin-3"):
        enrolling.redeem("two", impostor)
    assert enrolling.valid() == ["1"]
    assert [each.uses_left for each in enrolling.identities.invites(NOW)] == [2]
    enrolling.identities.revoke("orin-3", "stolen", NOW)
    assert enrolling.redeem("two", impostor).peer.installation == "beef"


def test_an_invite_with_the_name_replaces_the_device() -> None:
    enrolling = Enrolling()
    enrolling.invite("first")
    enrolling.invite("again", name="orin-3")
    enrolling.redeem("first")
    admission = enrolling.redeem("again", Application("", "agx-orin", "beef"))
    assert [each.serial for each in admission.replaced] == ["1"]
    assert enrolling.identities.is_revoked("1") and enrolling.valid() == ["2"]


def test_the_key_of_a_supernode_is_enrolled_once() -> None:
    enrolling = Enrolling()
    enrolling.invite("many", uses=5)
    enrolling.redeem("many", Application("orin-3", flower_key="ecdsa AAAA"))
    for name in ("orin-3", "orin-4"):
        with pytest.raises(AlreadyEnrolledError, match="the key of this SuperNode was already enrolled"):
            enrolling.redeem("many", Application(name, flower_key="ecdsa AAAA"))
    assert enrolling.valid() == ["1"] and enrolling.identities.invites(NOW)[0].uses_left == 4
    enrolling.redeem("many", Application("orin-4"))
    enrolling.redeem("many", Application("orin-5"))
    enrolling.identities.revoke("orin-3", "stolen", NOW)
    with pytest.raises(AlreadyEnrolledError):
        enrolling.redeem("many", Application("orin-6", flower_key="ecdsa AAAA"))
    enrolling.identities.expire(NOW + MONTH)
    enrolling.invite("later", now=NOW + MONTH)
    enrolling.redeem("later", Application("orin-6", flower_key="ecdsa AAAA"), NOW + MONTH)


def test_the_same_installation_may_enrol_again_and_its_lost_key_is_revoked() -> None:
    enrolling = Enrolling()
    enrolling.invite("two", uses=2)
    enrolling.redeem("two")
    enrolling.redeem("two")
    assert enrolling.valid() == ["2"]


def test_an_expired_certificate_holds_no_id() -> None:
    enrolling = Enrolling()
    enrolling.invite("first")
    enrolling.redeem("first")
    later = NOW + MONTH
    enrolling.invite("second", now=later)
    assert not enrolling.redeem("second", Application("orin-3", "", "beef"), later).replaced


def test_an_admission_that_was_not_stored_leaves_everything_as_it_was() -> None:
    enrolling = Enrolling()
    enrolling.invite("two", uses=2)
    enrolling.redeem("two")
    admission = enrolling.identities.redeem("two", ORIN, FLEET, NOW)
    lost = enrolling.issue(admission.peer)
    assert enrolling.valid() == ["2"]
    stored = enrolling.identities.take_back(admission, lost, NOW)
    assert enrolling.valid() == ["1"] and enrolling.identities.is_revoked("2")
    assert [each.uses_left for each in enrolling.identities.invites(NOW)] == [1]
    assert len(stored) == 3


@pytest.mark.parametrize("named", ["orin-3", "device orin-3", "1"])
def test_a_revocation_meanwhile_is_not_taken_back(named: str) -> None:
    enrolling = Enrolling()
    enrolling.invite("two", uses=2)
    enrolling.redeem("two")
    take_back = enrolling.unstored("two")
    assert "1" in [each.serial for each in enrolling.identities.revoke(named, "stolen", NOW)]
    take_back()
    assert enrolling.valid() == []
    first = enrolling.identities.find("1")
    assert first is not None and first.reason == "stolen"


def test_a_forgotten_device_does_not_come_back() -> None:
    enrolling = Enrolling()
    enrolling.invite("two", uses=2)
    enrolling.redeem("two")
    take_back = enrolling.unstored("two")
    enrolling.identities.forget(["orin-3"], NOW)
    take_back()
    assert enrolling.valid() == []


@pytest.mark.parametrize("uses", [1, 2])
def test_a_cancelled_invite_stays_closed(uses: int) -> None:
    enrolling = Enrolling()
    enrolling.invite("seen", uses=uses)
    take_back = enrolling.unstored("seen")
    enrolling.identities.cancel(token_hash("seen")[:12])
    take_back()
    assert enrolling.identities.invites(NOW) == []


@pytest.mark.parametrize(
    ("first", "second", "valid"), [(True, False, ["2"]), (False, True, ["3"]), (False, False, ["1"])]
)
def test_of_two_machines_that_enrol_at_once_only_stored_ones_count(first: bool, second: bool, valid: list[str]) -> None:
    """Machines 2 and 3 replace machine 1, which stays replaced if either of the two is stored."""
    enrolling = Enrolling()
    for token in ("old", "a", "b"):
        enrolling.invite(token, name="orin-3")
    enrolling.redeem("old")
    identities = enrolling.identities
    enrolments = []
    for token in ("a", "b"):
        admission = identities.redeem(token, ORIN, FLEET, NOW)
        enrolments.append((admission, enrolling.issue(admission.peer)))
    for (admission, record), is_stored in zip(enrolments, (first, second), strict=True):
        if is_stored:
            identities.admitted(admission)
        else:
            identities.take_back(admission, record, NOW)
    assert enrolling.valid() == valid


# --- certificates -------------------------------------------------------------------------------------------------


def test_certificates_are_revoked_by_name_or_by_number() -> None:
    enrolling = Enrolling()
    anna, bea = (Peer(FLEET, Role.OPERATOR, name) for name in ("anna", "bea"))
    for peer in (anna, anna, bea, Peer(FLEET, Role.VIEWER, "anna")):
        enrolling.issue(peer)
    assert [each.serial for each in enrolling.identities.revoke("1", "lost", NOW)] == ["1"]
    assert [each.serial for each in enrolling.identities.revoke("operator anna", "left", NOW)] == ["2"]
    assert [each.serial for each in enrolling.identities.revoke("anna", "left", NOW)] == ["4"]
    assert enrolling.valid() == ["3"]
    for name in ("anna", "1", "nobody", ""):
        with pytest.raises(UnknownRecordError, match="certificates. lists them"):
            enrolling.identities.revoke(name, "", NOW)


def test_a_peer_collects_no_certificates() -> None:
    enrolling = Enrolling()
    peer = Peer(FLEET, Role.DEVICE, "orin-3", "agx-orin", "6f0c")
    now = NOW
    for _ in range(1000):
        try:
            enrolling.identities.require_renewable(peer, MONTH, now)
        except QuotaExceededError:
            now += timedelta(hours=1)
        else:
            enrolling.issue(peer, now)
    assert len(enrolling.valid(now)) <= 44
    quiet = now + MONTH / 10
    enrolling.identities.require_renewable(peer, MONTH, quiet)


def test_owners_without_a_certificate_of_the_new_authority_are_named() -> None:
    enrolling = Enrolling()
    anna, bea, old = (Peer(FLEET, Role.OPERATOR, name) for name in ("anna", "bea", "old"))
    for peer in (anna, bea, old):
        enrolling.issue(peer)
    enrolling.identities.revoke("old", "", NOW)
    enrolling.issue(anna, issuer="new")
    assert [each.peer for each in enrolling.identities.not_issued_by("new", NOW)] == [bea]
    assert enrolling.identities.not_issued_by("new", NOW + MONTH) == []


def test_what_has_expired_is_dropped_and_what_counts_is_kept() -> None:
    enrolling = Enrolling()
    enrolling.invite("short", ttl=timedelta(minutes=1))
    enrolling.invite("long", ttl=timedelta(days=2))
    enrolling.issue(Peer(FLEET, Role.VIEWER, "old"), NOW - MONTH)
    enrolling.issue(Peer(FLEET, Role.VIEWER, "new"))
    enrolling.identities.expire(NOW + timedelta(minutes=1))
    with pytest.raises(UnknownInviteError):
        enrolling.redeem("short")
    assert enrolling.redeem("long").peer.name == "orin-3"
    assert [enrolling.identities.find(each) is not None for each in "12"] == [False, True]


def test_records_have_no_secret() -> None:
    enrolling = Enrolling()
    enrolling.invite("very-secret")
    assert "very-secret" not in repr([dataclasses.asdict(each) for each in enrolling.identities.invites(NOW)])
