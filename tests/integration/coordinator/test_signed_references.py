"""The operator's commands that sign references, and what a coordinator serves of them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from coordinator.reference_metadata import ReferenceMetadata, key_of_pem, utc_now
from coordinator.settings import CoordinatorSettings
from coordinator.signing_folder import SigningFolder
from tests.fakes.served import Client, serving_client, status
from tests.fakes.shell import asked, command, served_with_shell
from tests.fakes.signed_repository import BEGIN, SignedRepository, TrustingDevice, VirtualClock, reference
from wattfleet.errors import InvalidInputError
from wattfleet.prediction import Artefact, write_artefact
from wattfleet_proto.v1 import operator_pb2, session_pb2


@pytest.fixture
def signing(config: CoordinatorSettings, tmp_path: Path) -> CoordinatorSettings:
    """A coordinator that serves signed references."""
    profiling = config.profiling.model_copy(update={"reference_metadata": tmp_path / "metadata"})
    return config.model_copy(update={"profiling": profiling})


async def served_file(client: Client, name: str) -> bytes:
    answer = await client.sessions.FetchMetadata(session_pb2.FetchMetadataRequest(name=name))
    return bytes(answer.content)


async def test_commands_sign_and_rotate_what_a_device_then_takes(
    signing: CoordinatorSettings, tmp_path: Path, another: Artefact
) -> None:
    keys, folder = str(tmp_path / "keys"), tmp_path / "another"
    write_artefact(another, folder)
    async with served_with_shell(signing) as (client, shell):
        said = (await shell("reference", "keys", "init", "--out", keys, columns=200)).stdout
        assert "created 2 root keys, of which 1 sign together" in said and "trust-references 1.root.json" in said
        root = (tmp_path / "keys" / "1.root.json").read_bytes()
        device = TrustingDevice(tmp_path / "state", client.sessions, root, utc_now)
        await shell("reference", "publish", str(folder), "--keys", keys, columns=200)
        assert await device.take(another.digest) == [another.digest]
        shown = json.loads(command("reference", "keys", "show", keys, "--json").stdout)
        assert shown["digests"] == [another.digest]
        root_key = shown["root"]["keys"][0]["id"]
        next((tmp_path / "keys").glob(f"root-{root_key[:8]}.pem")).unlink()
        assert "private key is missing" in command("reference", "keys", "show", keys).stdout
        said = (await shell("reference", "keys", "rotate", keys, "--replace", root_key[:8], columns=200)).stdout
        assert "version 2 of the root is served" in said
        await shell("reference", "sign", "--keys", keys, "--revoke", another.digest[:8], columns=200)
        with pytest.raises(InvalidInputError, match="does not match exactly one id"):
            await shell("reference", "sign", "--keys", keys, "--revoke", another.digest[:8])
        with pytest.raises(Exception, match="not named"):
            await device.take(another.digest)
        again = await asked(shell, "reference", "sign", str(folder), "--keys", keys, "--days", "30")
        assert again["digests"] == [another.digest]
        assert again["targets"]["expires_unix_s"] - utc_now().timestamp() < 30 * 86_400
        assert await device.take(another.digest) == [another.digest]
    async with serving_client(signing) as client:
        assert await served_file(client, "2.root.json") == (tmp_path / "keys" / "2.root.json").read_bytes()


async def test_a_coordinator_without_the_setting_says_how_to_serve_them(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with served_with_shell(config) as (client, shell):
        with pytest.raises(InvalidInputError, match="start it with --reference-metadata"):
            await shell("reference", "keys", "init", "--out", str(tmp_path / "keys"))
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await served_file(client, "timestamp.json")
        assert status(missing)[0] is grpc.StatusCode.NOT_FOUND
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ["online.pem", "../1.root.json", "", "root.json", "1.root.json\0", "01.root.json"])
async def test_no_other_file_of_the_folder_is_served(signing: CoordinatorSettings, name: str) -> None:
    async with serving_client(signing) as client:
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await served_file(client, name)
        assert status(missing)[0] is grpc.StatusCode.NOT_FOUND


async def test_metadata_that_is_not_signed_by_the_operator_is_not_served(
    signing: CoordinatorSettings, tmp_path: Path
) -> None:
    async with serving_client(signing) as client:
        for root, targets, text in (
            (b"{}", b"", "the signed root is damaged"),
            (b" " * 70_000, b"", "the limit is 65,536"),
            (b"", b"", "no root has been published yet"),
        ):
            request = operator_pb2.PublishMetadataRequest(roots=[root] if root else [], targets=targets)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.operator.PublishMetadata(request)
            assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT and text in status(refused)[1]


# --- what the coordinator accepts ---------------------------------------------------------------------------------


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def repository(tmp_path: Path, clock: VirtualClock) -> SignedRepository:
    repository = SignedRepository(tmp_path / "operator", clock)
    repository.publish(reference("old"))
    return repository


def test_other_and_older_metadata_is_refused_and_the_served_one_stays(
    tmp_path: Path, repository: SignedRepository, clock: VirtualClock
) -> None:
    first_root, old_targets = repository.operator.roots[0], repository.operator.signed_targets
    repository.publish(reference("new"))
    before = repository.files()
    online = key_of_pem(repository.metadata.online_key)
    stranger = SigningFolder.create(tmp_path / "stranger", online, now=clock)
    metadata = repository.metadata
    for roots, targets, text in (
        ([first_root], old_targets, "version 2 of the signed targets is older than version 3"),
        (stranger.roots, b"", "a different root of version 1 is served"),
        ([first_root], stranger.signed_targets, "lacks signatures of the keys"),
        ([first_root], first_root, "has another type"),
    ):
        with pytest.raises(InvalidInputError, match=text):
            metadata.publish(roots, targets)
    stranger.rotate()
    with pytest.raises(InvalidInputError, match="lacks signatures of the keys"):
        metadata.publish([first_root, stranger.roots[1]], b"")
    clock.pass_time(days=400)
    with pytest.raises(InvalidInputError, match="expired on"):
        repository.operator.targets.version += 1
        metadata.publish([first_root], _expired(repository))
    assert repository.files() == before


def _expired(repository: SignedRepository) -> bytes:
    now = repository.clock.time
    repository.clock.time = BEGIN + timedelta(days=1)
    repository.operator.sign([])
    repository.clock.time = now
    return repository.operator.signed_targets


def test_a_restarted_coordinator_goes_on_and_a_damaged_folder_says_how_to_repair_it(
    repository: SignedRepository, clock: VirtualClock
) -> None:
    folder, before = repository.metadata.folder, repository.files()
    again = ReferenceMetadata(folder, clock)
    assert again.digests == repository.operator.digests and repository.files() == before
    (folder / "timestamp.json").write_bytes(b"{")
    ReferenceMetadata(folder, clock)
    version = json.loads(repository.files()["timestamp.json"])["signed"]["version"]
    assert version >= json.loads(before["timestamp.json"])["signed"]["version"]
    (folder / "1.root.json").write_bytes(b"{")
    with pytest.raises(InvalidInputError, match=r"1\.root\.json: the signed root is damaged; remove it, and publish"):
        ReferenceMetadata(folder, clock)


def test_the_operator_is_warned_in_the_last_month_of_a_signature(
    repository: SignedRepository, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.pass_time(days=334)
    repository.metadata.renew()
    assert not caplog.records
    clock.pass_time(days=2)
    for _ in range(5):
        repository.metadata.renew()
    assert [record.message for record in caplog.records] == [
        "the references' signed targets expires on 2027-03-01: sign it again (docs/references.md)"
    ]
