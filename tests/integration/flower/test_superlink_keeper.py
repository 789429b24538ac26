"""The keeper that updates a SuperLink's certificate and SuperNodes, with a real coordinator."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.supercore.error import FlowerError

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import LIFETIME, CertifiedFleet, calling, certified, joined, serving
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.certificates import matches
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.identity_folder import FOR_SUPERLINK, proof_of, write_identity
from wattfleet.common.identity.joining import Applicant
from wattfleet.common.identity.peers import Role
from wattfleet.common.identity.supernode_folder import SuperNodeKey
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower.superlink.access import ControlAccess, NodeRegistry, StoredList, flower_key
from wattfleet.flower.superlink.keeper import Keeper
from wattfleet.flower.superlink.server_certificate import ServerCertificate, SuperLinkRefusedError, WatchedFiles
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc

EVERY_S = 2.0


class Nodes:
    """Flower's Control API, reduced to the names of registered SuperNodes."""

    def __init__(self) -> None:
        self.named: dict[bytes, str] = {}

    def ListNodes(self, request: Any) -> ListNodesResponse:  # noqa: N802 - named by Flower
        from flwr.proto.node_pb2 import NodeInfo

        nodes = [NodeInfo(node_id=n, public_key=key, status="online") for n, key in enumerate(self.named, 1)]
        return ListNodesResponse(nodes_info=nodes)

    def RegisterNode(self, request: Any) -> None:  # noqa: N802 - named by Flower
        self.named[request.public_key] = request.name

    def UnregisterNode(self, request: Any) -> None:  # noqa: N802 - named by Flower
        del self.named[list(self.named)[request.node_id - 1]]


class SuperLink:
    """The parts of a SuperLink that Wattfleet adds to Flower's own."""

    def __init__(self, address: str, fleet: CertifiedFleet, folder: Path, files: WatchedFiles | None = None) -> None:
        write_identity(folder, fleet.identity(Role.SUPERLINK, "superlink"))
        endpoint = Endpoint.of(address, folder)
        self.nodes = Nodes()
        self.certificate = ServerCertificate(endpoint)
        self.access = ControlAccess(fleet.authority.authority.fleet, folder / "trusted.pem")
        self.reloads: list[str] = []
        self.now = utc_now()
        self.keeper = Keeper(
            endpoint,
            files or self.certificate,
            self.access,
            NodeRegistry(self.nodes),
            StoredList(self.certificate.folder),
            lambda: self.reloads.append("TLS"),
            EVERY_S,
            lambda: self.now,
        )


@pytest.fixture
def settings(config: CoordinatorSettings, fleet: CertifiedFleet) -> CoordinatorSettings:
    told = {"address": "site.example:8000"}
    return certified(config, fleet.authority.folder).with_values(superlink=told)


async def test_nodes_follow_the_coordinator_and_stay_while_it_is_away(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        assert await asyncio.to_thread(superlink.certificate.prepare) == ""
        key = superlink.certificate.key_file.read_bytes()
        assert matches(key, superlink.certificate.certificate_file.read_bytes())
        assert await asyncio.to_thread(superlink.keeper.check) == EVERY_S and superlink.nodes.named == {}
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        for name in ("nano-1", "nano-2"):
            await joined(service, Role.DEVICE, Applicant(name, "orin-nano", "6f0c"), name, SuperNodeKey.create().public)
        await asyncio.to_thread(superlink.keeper.check)
        assert sorted(superlink.nodes.named.values()) == ["nano-1", "nano-2"]
        await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="nano-1"))
        await asyncio.to_thread(superlink.keeper.check)
        assert list(superlink.nodes.named.values()) == ["nano-2"]
    waits = [await asyncio.to_thread(superlink.keeper.check) for _ in range(5)]
    assert waits == sorted(waits) and EVERY_S < waits[0] and waits[-1] == 30
    assert list(superlink.nodes.named.values()) == ["nano-2"]
    # A SuperLink that starts now uses the certificate that it has; one that never had any does not start.
    assert "no coordinator answers" in await asyncio.to_thread(superlink.certificate.prepare)
    fresh = SuperLink(served.bound.address, fleet, tmp_path / "fresh")
    with pytest.raises(InvalidInputError, match="has no valid TLS certificate"):
        await asyncio.to_thread(fresh.certificate.prepare)


async def test_a_start_without_the_coordinator_knows_the_revocations_of_before(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        first = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        await asyncio.to_thread(first.keeper.restore)
        assert "no list is stored" in caplog.text
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        anna = await joined(service, Role.FLOWER, Applicant(), "anna")
        for name in ("nano-1", "nano-2"):
            await joined(service, Role.DEVICE, Applicant(name, "orin-nano", "6f0c"), name, SuperNodeKey.create().public)
        for name in ("anna", "nano-1"):
            await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial=name))
        await asyncio.to_thread(first.keeper.check)
    stored = first.certificate.folder / "enrolled.json"
    assert stored.stat().st_mode & 0o777 == 0o600
    second = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
    second.now += timedelta(hours=3)
    await asyncio.to_thread(second.keeper.restore)
    assert "which is 3 h old: 1 SuperNode and 1 revoked certificate" in caplog.text
    with pytest.raises(FlowerError, match="flower anna was revoked"):
        second.access.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, proof_of(anna, FOR_SUPERLINK, utc_now()))])
    await asyncio.to_thread(second.keeper.check)
    assert list(second.nodes.named.values()) == ["nano-2"]
    stored.write_text("{}")
    await asyncio.to_thread(SuperLink(served.bound.address, fleet, tmp_path / "superlink").keeper.restore)
    assert "enrolled.json is damaged: delete it" in caplog.text


async def test_a_board_counts_as_not_enrolled_only_once_the_coordinator_has_said_so(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    mine, other = SuperNodeKey.create(), SuperNodeKey.create()
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await joined(service, Role.DEVICE, Applicant("nano-1", "orin-nano", "6f0c"), "nano-1", mine.public)
        mine_pem, other_pem = (flower_key(each.public.decode()) for each in (mine, other))
        assert not superlink.keeper.is_not_enrolled(other_pem)
        await asyncio.to_thread(superlink.keeper.check)
        assert superlink.keeper.is_not_enrolled(other_pem) and not superlink.keeper.is_not_enrolled(mine_pem)
        await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="nano-1"))
        await asyncio.to_thread(superlink.keeper.check)
        assert superlink.keeper.is_not_enrolled(mine_pem)
    # A SuperLink that starts while the coordinator is away has an older list, which may lack new boards.
    second = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
    await asyncio.to_thread(second.keeper.restore)
    assert not second.keeper.is_not_enrolled(mine_pem)


async def test_a_list_that_still_holds_is_not_old(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    async with serving(settings) as served:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        await asyncio.to_thread(superlink.keeper.check)
        superlink.now += timedelta(hours=3)
        await asyncio.to_thread(superlink.keeper.check)
        superlink.now += timedelta(minutes=10)
        await asyncio.to_thread(superlink.keeper.restore)
    assert "which is 10 min old" in caplog.text


async def test_an_unexpected_error_ends_no_later_look(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(request: Any) -> ListNodesResponse:
        raise RuntimeError("Flower has changed")

    async with serving(settings) as served:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        monkeypatch.setattr(superlink.nodes, "ListNodes", failing)
        assert await asyncio.to_thread(superlink.keeper.check) == 2 * EVERY_S
        assert superlink.certificate.certificate_file.exists(), "what comes after the failure was done"


async def test_the_certificate_is_renewed_when_the_authority_was_replaced(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        await asyncio.to_thread(superlink.certificate.prepare)
        await asyncio.to_thread(superlink.keeper.check)
        assert superlink.reloads == []
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await service.BeginRotation(identity_pb2.BeginRotationRequest())
        await asyncio.to_thread(superlink.keeper.check)
        second = superlink.certificate.certificate_file.read_bytes()
        assert fleet.authority.authority.has_issued(second), "not everybody trusts the new authority yet"
        renewed = AuthorityFolder.open(fleet.authority.folder).own_identity(
            Role.SUPERLINK, "superlink", served.bound.address, LIFETIME, utc_now()
        )
        write_identity(tmp_path / "superlink", renewed)
        await service.FinishRotation(identity_pb2.FinishRotationRequest())
        await asyncio.to_thread(superlink.keeper.check)
        third = superlink.certificate.certificate_file.read_bytes()
        assert AuthorityFolder.open(fleet.authority.folder).authority.has_issued(third)
        assert superlink.reloads == ["TLS", "TLS"]
        await asyncio.to_thread(superlink.keeper.check)
        assert superlink.reloads == ["TLS", "TLS"]


async def test_the_superlink_trusts_whom_the_coordinator_trusts_now(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        await asyncio.to_thread(superlink.certificate.prepare)
        access = ControlAccess(fleet.authority.authority.fleet, superlink.certificate.trusted_file)
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await service.BeginRotation(identity_pb2.BeginRotationRequest())
        await asyncio.to_thread(superlink.keeper.check)
        renewed = AuthorityFolder.open(fleet.authority.folder).own_identity(
            Role.SUPERLINK, "superlink", served.bound.address, LIFETIME, utc_now()
        )
        proofs = [proof_of(each, FOR_SUPERLINK, utc_now()) for each in (fleet.identity(Role.OPERATOR), renewed)]
        for proof in proofs:
            assert access.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, proof)])[0]
        write_identity(tmp_path / "superlink", renewed)
        await service.FinishRotation(identity_pb2.FinishRotationRequest())
        await asyncio.to_thread(superlink.keeper.check)
        with pytest.raises(FlowerError, match="authority that is not trusted"):
            access.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, proofs[0])])
        assert access.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, proofs[1])])[0]


async def test_what_the_coordinator_refuses_is_said(
    config: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    async with serving(certified(config, fleet.authority.folder)) as served:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink")
        with pytest.raises(SuperLinkRefusedError, match="restart it with --superlink-address HOST:PORT"):
            await asyncio.to_thread(superlink.certificate.prepare)


async def test_tls_files_of_the_user_are_used_when_they_are_replaced(
    settings: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    pem, key = tmp_path / "live.pem", tmp_path / "live.key"
    pem.symlink_to(tmp_path / "first.pem")  # as certbot does
    for path in (tmp_path / "first.pem", tmp_path / "second.pem", key):
        path.write_text(path.name)
    async with serving(settings) as served:
        superlink = SuperLink(served.bound.address, fleet, tmp_path / "superlink", WatchedFiles(pem, key))
        assert await asyncio.to_thread(superlink.keeper.check) == EVERY_S
        assert superlink.reloads == [] and not superlink.certificate.certificate_file.exists()
        pem.unlink()
        assert await asyncio.to_thread(superlink.keeper.check) == 2 * EVERY_S
        assert "The earlier ones stay in use; trying again" in caplog.text
        pem.symlink_to(tmp_path / "second.pem")
        await asyncio.to_thread(superlink.keeper.check)
        await asyncio.to_thread(superlink.keeper.check)
        assert superlink.reloads == ["TLS"]
    assert caplog.text.count("The TLS files were replaced. New connections use them") == 1
