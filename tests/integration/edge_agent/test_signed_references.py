"""Signed references: attacks on them, keys that are replaced and lost, signatures that expire, and wrong clocks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Targets, Timestamp

from coordinator.references.metadata import SHOWN_DIGITS, ReferenceMetadata, key_of_pem
from coordinator.references.signing_folder import SigningFolder
from edge_agent.session import references
from edge_agent.session.references import ReferenceTrust, ReferenceUntrustedError, trust_root
from tests.fakes.signed_repository import (
    BEGIN,
    SignedRepository,
    TrustingDevice,
    VirtualClock,
    forged,
    online_key,
    reference,
    signed_chain,
    stranger,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.prediction import Artefact
from wattfleet_proto.limits import MAX_METADATA_BYTES
from wattfleet_proto.names import target_names
from wattfleet_proto.v1 import session_pb2

# --- Reference attacks ------------------------------------------------------------------------------------------------
# Attacks on signed references: each is refused with its own error, and the previous reference stays in force.


OLD, NEW = reference("old"), reference("new")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def repository(tmp_path: Path, clock: VirtualClock) -> SignedRepository:
    repository = SignedRepository(tmp_path / "operator", clock)
    repository.publish(OLD)
    return repository


@pytest.fixture
async def device(tmp_path: Path, repository: SignedRepository, clock: VirtualClock) -> TrustingDevice:
    """A device that has accepted the old reference."""
    device = TrustingDevice(tmp_path / "state", repository, repository.operator.roots[0])
    assert await device.take(OLD.digest) == [OLD.digest]
    clock.pass_time(minutes=1)
    return device


async def require_refused(device: TrustingDevice, name: str, new: Artefact = NEW) -> None:
    """Check that the new reference is refused with this error and not stored, and that the old one stays in use."""
    assert await device.take(new.digest) == [OLD.digest]
    assert f"is refused: {name}" in device.references.refused
    assert device.in_force == (OLD.digest,)
    assert [folder.name for folder in (device.state / "references").iterdir()] == [OLD.digest]


async def test_without_an_attack_the_new_reference_is_taken(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    repository.publish(NEW)
    assert await device.take(NEW.digest) == [NEW.digest]
    assert (device.in_force, device.references.refused) == ((NEW.digest,), "")


# --- tampered files -----------------------------------------------------------------------------------------------


def with_a_flipped_bit(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


class Sent:
    """Stands in for an artefact: bytes that need not match."""

    def __init__(self, manifest: bytes, weights: bytes) -> None:
        self.manifest = manifest
        self.weights = weights


async def test_tampered_weights_are_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(NEW)
    repository.artefacts[NEW.digest] = Sent(NEW.manifest, with_a_flipped_bit(NEW.weights))  # type: ignore[assignment]
    await require_refused(device, "tampered")


async def test_a_tampered_manifest_is_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(NEW)
    repository.artefacts[NEW.digest] = Sent(with_a_flipped_bit(NEW.manifest), NEW.weights)  # type: ignore[assignment]
    await require_refused(device, "asked for reference")


async def test_a_reference_that_nobody_signed_is_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.artefacts[NEW.digest] = NEW
    await require_refused(device, "not named")


async def test_a_tampered_timestamp_is_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(NEW)
    content = json.loads(repository.files()["timestamp.json"])
    content["signed"]["expires"] = "2036-01-01T00:00:00Z"
    repository.replaced["timestamp.json"] = json.dumps(content).encode()
    await require_refused(device, "unsigned")


async def test_tampered_targets_are_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(NEW)
    evil, files = reference("evil"), repository.files()
    repository.artefacts[evil.digest] = evil
    name = f"{repository.operator.targets.version}.targets.json"
    content = json.loads(files[name])
    for of_new, of_evil in zip(target_names(NEW.digest), target_names(evil.digest), strict=True):
        content["signed"]["targets"][of_evil] = content["signed"]["targets"].pop(of_new)
    repository.replaced[name] = json.dumps(content, separators=(",", ":")).encode()
    await require_refused(device, "mixed", evil)


# --- wrong keys ---------------------------------------------------------------------------------------------------


async def test_metadata_of_a_stranger_is_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.artefacts[NEW.digest] = NEW
    repository.replaced = forged(repository, NEW, stranger(), stranger())
    await require_refused(device, "unsigned")


@pytest.mark.parametrize("with_online_key", [False, True], ids=["stranger", "online key"])
async def test_a_stolen_online_key_names_no_reference(
    repository: SignedRepository, device: TrustingDevice, with_online_key: bool
) -> None:
    repository.artefacts[NEW.digest] = NEW
    stolen = online_key(repository)
    repository.replaced = forged(repository, NEW, stolen if with_online_key else stranger(), stolen)
    await require_refused(device, "unsigned")


async def test_a_root_of_a_stranger_is_refused(
    tmp_path: Path, repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    other = SignedRepository(tmp_path / "stranger", clock)
    other.publish(NEW)
    other.operator.rotate()
    other.serve()
    repository.artefacts[NEW.digest] = NEW
    repository.replaced = other.files()
    await require_refused(device, "unsigned")


# --- old metadata -------------------------------------------------------------------------------------------------


async def test_a_rollback_of_the_timestamp_is_refused(
    repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    before = repository.files()
    repository.publish(NEW)
    clock.pass_time(minutes=1)
    repository.operator.sign([], [NEW.digest])
    repository.serve()
    assert await device.take(OLD.digest) == [OLD.digest]
    repository.replaced = {"timestamp.json": before["timestamp.json"]}
    await require_refused(device, "rolled back")


async def test_a_rollback_of_targets_with_the_online_key_is_refused(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    repository.publish(NEW)
    vulnerable = repository.operator.signed_targets
    repository.operator.sign([], [NEW.digest])
    repository.serve()
    assert await device.take(OLD.digest) == [OLD.digest]
    targets = Metadata[Targets].from_bytes(vulnerable).signed
    newest = Metadata[Timestamp].from_bytes(repository.files()["timestamp.json"]).signed
    chain = signed_chain(
        targets, newest.snapshot_meta.version + 1, newest.version + 1, stranger(), online_key(repository)
    )
    repository.replaced = chain
    await require_refused(device, "rolled back")


async def test_frozen_metadata_is_refused_after_a_day(
    repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    repository.publish(NEW)
    repository.replaced = repository.files()
    clock.pass_time(hours=25)
    repository.metadata.renew()
    await require_refused(device, "expired")
    repository.replaced = {}
    assert await device.take(NEW.digest) == [NEW.digest]


async def test_an_old_snapshot_under_a_new_timestamp_is_refused(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    before = repository.files()
    repository.publish(NEW)
    version = Metadata[Timestamp].from_bytes(repository.files()["timestamp.json"]).signed.snapshot_meta.version
    old_snapshot = next(content for name, content in before.items() if name.endswith("snapshot.json"))
    repository.replaced = {f"{version}.snapshot.json": old_snapshot}
    await require_refused(device, "mixed")


async def test_old_targets_under_a_new_snapshot_are_refused(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    before = repository.operator.signed_targets
    repository.publish(NEW)
    repository.replaced = {f"{repository.operator.targets.version}.targets.json": before}
    await require_refused(device, "mixed")


# --- too much or too little data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets", "root"])
async def test_endless_metadata_is_refused(repository: SignedRepository, device: TrustingDevice, role: str) -> None:
    repository.publish(NEW)
    newest = [name for name in repository.files() if name.endswith(f"{role}.json")]
    names = ["2.root.json"] if role == "root" else newest
    repository.replaced = dict.fromkeys(names, b" " * (1 + MAX_METADATA_BYTES))
    await require_refused(device, "too long")


class Endless(SignedRepository):
    """Announces the signed length, or another one, and sends weights without end."""

    announced = 0

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, timeout: float
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        announced = self.announced or len(NEW.weights)
        yield session_pb2.FetchReferenceResponse(manifest=NEW.manifest, weights_bytes=announced)
        while True:
            self.sent_bytes += 100_000
            assert self.sent_bytes < len(NEW.weights) + 200_000
            yield session_pb2.FetchReferenceResponse(weights_chunk=bytes(100_000))


@pytest.mark.parametrize(
    ("announced", "name"), [(0, "the coordinator sent more weights"), (3_000_000, "tampered"), (2**40, "the coordin")]
)
async def test_endless_weights_are_cut_off(
    repository: SignedRepository, device: TrustingDevice, announced: int, name: str
) -> None:
    repository.publish(NEW)
    repository.__class__, repository.sent_bytes = Endless, 0
    repository.announced = announced  # type: ignore[attr-defined]
    await require_refused(device, name)


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets"])
async def test_truncated_metadata_is_refused(repository: SignedRepository, device: TrustingDevice, role: str) -> None:
    repository.publish(NEW)
    (name, content), *_ = sorted(
        ((name, content) for name, content in repository.files().items() if name.endswith(f"{role}.json")), reverse=True
    )
    repository.replaced = {name: content[:-100]}
    await require_refused(device, "damaged" if role == "timestamp" else "mixed")


async def test_a_truncated_reference_is_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(NEW)
    repository.artefacts[NEW.digest] = Sent(NEW.manifest, NEW.weights[:-1])  # type: ignore[assignment]
    await require_refused(device, "tampered")


class EndingEarly(SignedRepository):
    """Announces the signed length, and never sends the second half."""

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, timeout: float
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        yield session_pb2.FetchReferenceResponse(
            manifest=NEW.manifest, weights_bytes=len(NEW.weights), weights_offset=request.weights_offset
        )
        half = NEW.weights[: len(NEW.weights) // 2]
        yield session_pb2.FetchReferenceResponse(weights_chunk=half[request.weights_offset :])


async def test_a_reference_that_always_ends_early_is_refused(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    repository.publish(NEW)
    repository.__class__ = EndingEarly
    await require_refused(device, "the coordinator sends only")


# --- swapped files and decompression bombs ------------------------------------------------------------------------


async def test_what_is_swapped_on_the_disk_is_not_used(
    repository: SignedRepository, device: TrustingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = references.write_artefact

    def write_and_swap(artefact: Artefact, folder: Path) -> None:
        write(artefact, folder)
        for path in folder.iterdir():
            path.write_bytes(with_a_flipped_bit(path.read_bytes()))

    repository.publish(NEW)
    monkeypatch.setattr(references, "write_artefact", write_and_swap)
    [used] = await device.references.of([NEW.digest])
    assert used == NEW
    monkeypatch.setattr(references, "write_artefact", write)
    [fetched_again] = await device.references.of([NEW.digest])
    assert fetched_again == NEW


async def test_a_reference_that_is_swapped_in_the_cache_by_a_valid_one_is_not_used(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    evil = reference("evil")
    for name, content in (("manifest.json", evil.manifest), ("weights.safetensors", evil.weights)):
        (device.state / "references" / OLD.digest / name).write_bytes(content)
    assert [each.manifest for each in await device.references.of([OLD.digest])] == [OLD.manifest]


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "bomb",
    [nested(30_000), b'{"signed": {"version": ' + b"9" * 60_000 + b"}}", b"{" + b'"a":0,' * 9_000 + b'"a":0}', b""],
    ids=["nested", "digits", "keys", "empty"],
)
async def test_a_bomb_in_metadata_is_refused(repository: SignedRepository, device: TrustingDevice, bomb: bytes) -> None:
    repository.publish(NEW)
    repository.replaced = {"timestamp.json": bomb}
    await require_refused(device, "damaged")


async def test_a_bomb_in_weights_is_refused_before_it_is_parsed(
    repository: SignedRepository, device: TrustingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.dumps({"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}}).encode()
    bomb = (len(header).to_bytes(8, "little") + header).ljust(len(NEW.weights), b" ")
    repository.publish(NEW)
    repository.artefacts[NEW.digest] = Sent(NEW.manifest, bomb)  # type: ignore[assignment]
    parsed: list[bytes] = []

    def parse(manifest: bytes, weights: bytes) -> Artefact:
        parsed.append(weights)
        return Artefact(manifest, weights)

    monkeypatch.setattr(references, "Artefact", parse)
    await require_refused(device, "tampered")
    assert bomb not in parsed


async def test_a_manifest_of_megabytes_is_refused(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(NEW)
    repository.artefacts[NEW.digest] = Sent(b" " * 3_000_000, NEW.weights)  # type: ignore[assignment]
    await require_refused(device, "the coordinator sent a manifest of 3,000,000 bytes")


# --- Reference keys ---------------------------------------------------------------------------------------------------
# Signed references over the years: keys are replaced and lost, signatures expire, and clocks are wrong.


def opened_again(repository: SignedRepository) -> None:
    """Open the operator's folder again, with the remaining private keys."""
    repository.operator = SigningFolder(repository.operator.folder, now=repository.clock)


def lose_key(repository: SignedRepository, role: str) -> str:
    """Delete a private key of a role; returns its id."""
    keyid = next(keyid for keyid, is_here in repository.operator.keys_of(role) if is_here)
    (repository.operator.folder / f"{role}-{keyid[:SHOWN_DIGITS]}.pem").unlink()
    opened_again(repository)
    return keyid


# --- keys ---------------------------------------------------------------------------------------------------------


async def test_a_lost_root_key_is_replaced_with_the_help_of_another(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    lost = lose_key(repository, "root")
    repository.operator.rotate([lost[:8]])
    assert lost not in dict(repository.operator.keys_of("root"))
    assert all(is_here for _, is_here in repository.operator.keys_of("root"))
    repository.publish(NEW)
    assert await device.take(NEW.digest) == [NEW.digest]
    # The replacement key can sign the replacement of the key that is lost next.
    repository.operator.rotate([lose_key(repository, "root")[:8]])
    repository.publish(OLD)
    assert await device.take(OLD.digest) == [OLD.digest]


async def test_a_lost_key_of_references_is_replaced(repository: SignedRepository, device: TrustingDevice) -> None:
    lose_key(repository, "targets")
    with pytest.raises(InvalidInputError, match="--replace targets"):
        repository.operator.sign([NEW])
    opened_again(repository)
    repository.operator.rotate(["targets"])
    repository.publish(NEW)
    assert await device.take(NEW.digest) == [NEW.digest]


async def test_a_replaced_key_of_references_is_not_trusted_any_more(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    [stolen] = [repository.operator.signers[keyid] for keyid, _ in repository.operator.keys_of("targets")]
    repository.artefacts[NEW.digest] = NEW
    forged_before = forged(repository, NEW, stolen, online_key(repository))
    repository.operator.rotate(["targets"])
    repository.serve()
    repository.replaced = {**forged_before}
    assert await device.take(NEW.digest) == [OLD.digest]
    assert "is refused: unsigned" in device.references.refused


async def test_a_coordinator_that_has_lost_its_folder_gets_a_new_one(
    tmp_path: Path, repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    repository.metadata = ReferenceMetadata(tmp_path / "new folder", clock)
    with pytest.raises(InvalidInputError, match="--replace online"):
        repository.serve()
    repository.operator.rotate([], key_of_pem(repository.metadata.online_key))
    repository.publish(NEW)
    assert await device.take(NEW.digest) == [NEW.digest]


async def test_a_replaced_online_key_recovers_from_metadata_of_the_future(
    repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    """Whoever steals the online key can sign such high versions that honest ones would count as old."""
    clock.pass_time(days=9_000)
    future = repository.metadata.folder
    ReferenceMetadata(future, clock)
    ahead = repository.files()
    clock.time = BEGIN + timedelta(hours=1)
    repository.replaced = {name: content for name, content in ahead.items() if "snapshot" in name or "time" in name}
    for name in ("online.pem", "timestamp.json", *(path.name for path in future.glob("*.snapshot.json"))):
        (future / name).unlink()
    await device.take(OLD.digest)
    repository.replaced = {}
    repository.metadata = ReferenceMetadata(future, clock)
    repository.operator.rotate([], key_of_pem(repository.metadata.online_key))
    repository.publish(NEW)
    assert await device.take(NEW.digest) == [NEW.digest]


async def test_a_device_follows_many_rotations_at_once(repository: SignedRepository, device: TrustingDevice) -> None:
    for _ in range(20):
        repository.operator.rotate([repository.operator.keys_of("root")[0][0][:8]])
    repository.publish(NEW)
    assert await device.take(NEW.digest) == [NEW.digest]


def test_two_of_three_root_keys_have_to_sign(tmp_path: Path, clock: VirtualClock) -> None:
    repository = SignedRepository(tmp_path, clock, root_keys=3, threshold=2)
    lost = lose_key(repository, "root")
    repository.operator.rotate([lost[:8]])
    repository.serve()
    first, second = (lose_key(repository, "root") for _ in range(2))
    with pytest.raises(InvalidInputError, match=r"2 of the 3 root keys have to sign \(1 available\)"):
        repository.operator.rotate([first[:8], second[:8]])


@pytest.mark.parametrize(("root_keys", "threshold"), [(2, 2), (1, 1), (3, 0)])
def test_keys_that_could_not_survive_a_loss_are_refused(tmp_path: Path, root_keys: int, threshold: int) -> None:
    online = key_of_pem(ReferenceMetadata(tmp_path / "served").online_key)
    with pytest.raises(InvalidInputError, match="could not be replaced"):
        SigningFolder.create(tmp_path / "keys", online, root_keys, threshold)
    assert not (tmp_path / "keys").exists()


def test_private_keys_are_for_their_owner_only(tmp_path: Path, repository: SignedRepository) -> None:
    keys = [*repository.operator.folder.glob("*.pem"), repository.metadata.folder / "online.pem"]
    assert len(keys) == 4
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    keys[0].chmod(0o640)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        opened_again(repository)


# --- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("days", [366, 1096], ids=["references", "root"])
async def test_an_expired_signature_holds_back_new_references_until_it_is_renewed(
    repository: SignedRepository, device: TrustingDevice, clock: VirtualClock, days: int
) -> None:
    repository.publish(NEW)
    clock.pass_time(days=days)
    repository.metadata.renew()
    assert await device.take(NEW.digest) == [OLD.digest]
    assert "is refused: expired" in device.references.refused
    repository.operator.rotate()
    repository.publish()
    assert await device.take(NEW.digest) == [NEW.digest]


async def test_the_coordinator_renews_its_own_signature(
    repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    repository.publish(NEW)
    for _ in range(40):
        clock.pass_time(hours=12.5)
        repository.metadata.renew()
    assert await device.take(NEW.digest) == [NEW.digest]
    assert len(repository.files()) <= 2 + 4 + 4, "old versions are removed"


def just_started() -> datetime:
    """The time that a board without a clock assumes."""
    return datetime(1970, 1, 1, 0, 5, tzinfo=timezone.utc)


async def test_a_board_without_a_clock_goes_by_the_coordinators(
    tmp_path: Path, repository: SignedRepository, clock: VirtualClock
) -> None:
    clock.pass_time(days=300)
    repository.publish(NEW)
    board = TrustingDevice(tmp_path / "board", repository, repository.operator.roots[0], just_started)
    assert await board.take(NEW.digest) == [NEW.digest]
    assert board.status.checked_unix_s == clock.time.timestamp(), "noted, for starts without the coordinator"
    repository.replaced = repository.files()
    clock.pass_time(days=2)
    assert await board.take(NEW.digest) == [NEW.digest]
    assert "is refused: expired" in board.references.refused


async def test_a_board_without_a_clock_goes_by_what_it_has_noted(
    tmp_path: Path, repository: SignedRepository, clock: VirtualClock
) -> None:
    repository.publish(NEW)
    repository.replaced = repository.files()
    trust_root(tmp_path / "board" / "reference-trust", repository.operator.roots[0], BEGIN.timestamp() + 2 * 86_400)
    board = TrustingDevice(tmp_path / "board", repository, repository.operator.roots[0], just_started)
    repository.clock_ahead_s = -1e9  # a coordinator that tries to have old metadata accepted
    with pytest.raises(ReferenceUntrustedError, match="expired"):
        await board.take(NEW.digest)


async def test_a_clock_of_the_coordinator_far_ahead_is_not_believed_for_long(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    repository.publish(NEW)
    for ahead_s in (1e10, 1e300, float("inf"), float("nan"), -1.0):
        repository.clock_ahead_s = ahead_s
        await device.take(NEW.digest)
    repository.clock_ahead_s = 0.0
    assert await device.take(NEW.digest) == [NEW.digest]


# --- the device ---------------------------------------------------------------------------------------------------


async def test_a_revoked_reference_does_not_go_on(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.publish(revoked=(OLD.digest[:8],))
    with pytest.raises(ReferenceUntrustedError, match="not named"):
        await device.take(OLD.digest)
    assert device.in_force == ()


async def test_references_in_force_are_used_while_the_coordinator_is_away(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    repository.is_away = True
    assert await device.take(OLD.digest) == [OLD.digest]
    assert device.references.refused == ""


async def test_a_reference_that_ships_needs_no_signature(repository: SignedRepository, device: TrustingDevice) -> None:
    shipped = repository.shipped
    asked = len(repository.asked)
    assert await device.take(shipped.digest) == [shipped.digest]
    assert len(repository.asked) == asked, "no metadata is needed"


async def test_an_unsigned_further_reference_is_left_out(repository: SignedRepository, device: TrustingDevice) -> None:
    repository.artefacts[NEW.digest] = NEW
    assert await device.take(OLD.digest, NEW.digest) == [OLD.digest]
    assert "is not used: not named" in device.references.refused
    repository.publish(NEW)
    await device.references.wait_until_accepted([OLD.digest, NEW.digest])
    assert device.in_force == (OLD.digest, NEW.digest)


async def test_a_device_that_never_accepted_any_waits_for_a_signed_one(
    tmp_path: Path, repository: SignedRepository
) -> None:
    repository.artefacts[NEW.digest] = NEW
    device = TrustingDevice(tmp_path / "fresh", repository, repository.operator.roots[0])
    with pytest.raises(ReferenceUntrustedError, match="not named"):
        await device.take(NEW.digest)
    assert not (tmp_path / "fresh" / "references").exists()


async def test_a_trust_folder_that_lost_its_root_trusts_nothing_new(
    repository: SignedRepository, device: TrustingDevice
) -> None:
    repository.publish(NEW)
    (device.state / "reference-trust" / "root.json").unlink()
    assert await device.take(NEW.digest) == [OLD.digest]
    assert "root.json: cannot be used" in device.references.refused


async def test_trusting_another_root_begins_anew(
    tmp_path: Path, repository: SignedRepository, device: TrustingDevice, clock: VirtualClock
) -> None:
    other = SignedRepository(tmp_path / "other", clock)
    trust_root(device.state / "reference-trust", other.operator.roots[0], clock.time.timestamp())
    with pytest.raises(ReferenceUntrustedError, match="unsigned"):
        await device.take(OLD.digest)
    with pytest.raises(InvalidInputError, match="not a root of signed references"):
        trust_root(tmp_path / "no", repository.operator.signed_targets, 0.0)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("checked", [1e12, 1.8e18, 1e400, -1.0])
def test_a_status_with_a_time_that_is_no_date_is_damaged(tmp_path: Path, checked: float) -> None:
    (tmp_path / "in-force.json").write_text(json.dumps({"digests": [], "refused": "", "checked_unix_s": checked}))
    with pytest.raises(InvalidInputError, match="is damaged; the agent writes it again"):
        _ = ReferenceTrust(tmp_path).status
