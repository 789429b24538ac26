"""What the coordinator provides to Flower's SuperLink: a TLS certificate, and the list of enrolled SuperNodes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, calling, certified, joined
from tests.fakes.served import Client, hello_of, serving
from wattfleet.errors import InvalidInputError
from wattfleet_identity.authority import SERVER_NAME
from wattfleet_identity.certificates import Certificate, matches, new_key, request_certificate
from wattfleet_identity.identity_folder import Identity
from wattfleet_identity.joining import Applicant
from wattfleet_identity.peers import Role
from wattfleet_identity.supernode_folder import SuperNodeKey
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    superlink_pb2,
    superlink_pb2_grpc,
)


@pytest.fixture
def settings(config: CoordinatorSettings, fleet: CertifiedFleet) -> CoordinatorSettings:
    told = {"address": "site.example:8000", "hosts": ("10.0.0.5",)}
    return certified(config, fleet.authority.folder).with_values(superlink=told)


async def enrolled_with(key: SuperNodeKey, client: Client, device_id: str) -> Identity:
    """Enrol a device with the key of its SuperNode."""
    service = identity_pb2_grpc.IdentityServiceStub(client.channel)
    return await joined(service, Role.DEVICE, Applicant(device_id, "orin-nano", "6f0c"), device_id, key.public)


async def supernodes(client: Client, known: str = "") -> tuple[dict[str, str], Any]:
    service = superlink_pb2_grpc.SuperLinkServiceStub(client.channel)
    parts = [part async for part in service.ListSuperNodes(superlink_pb2.ListSuperNodesRequest(known_revision=known))]
    return {view.device_id: view.public_key for part in parts for view in part.supernodes}, parts[0]


async def test_enrolled_supernodes_are_listed_until_they_are_revoked_or_forgotten(
    settings: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    keys = {name: SuperNodeKey.create() for name in ("nano-1", "nano-2", "nano-3")}
    async with (
        serving(settings) as served,
        calling(served, fleet.identity(Role.OPERATOR)) as operator,
        calling(served, fleet.identity(Role.SUPERLINK)) as superlink,
    ):
        for name, key in keys.items():
            identity = await enrolled_with(key, operator, name)
            assert identity.superlink == "site.example:8000"
        found, first = await supernodes(superlink)
        assert found == {name: key.public.decode() for name, key in keys.items()}
        unchanged, again = await supernodes(superlink, first.revision)
        assert again.is_unchanged and unchanged == {}
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="nano-1"))
        found, second = await supernodes(superlink, first.revision)
        assert set(found) == {"nano-2", "nano-3"} and second.revision != first.revision
        async with calling(served, identity) as device:  # nano-3 renews its certificate, and keeps its key
            renewing = enrolment_pb2_grpc.EnrolmentServiceStub(device.channel)
            request = enrolment_pb2.RenewRequest(request_pem=request_certificate(identity.key_pem))
            assert (await renewing.Renew(request)).superlink == "site.example:8000"
        found, _ = await supernodes(superlink)
        assert found["nano-3"] == keys["nano-3"].public.decode()
        renewed = SuperNodeKey.create()
        await enrolled_with(renewed, operator, "nano-2")
        found, _ = await supernodes(superlink)
        assert found["nano-2"] == renewed.public.decode()


async def test_a_forgotten_device_has_to_enrol_again(settings: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    async with (
        serving(settings) as served,
        calling(served, fleet.identity(Role.OPERATOR)) as operator,
        calling(served, fleet.identity(Role.SUPERLINK)) as superlink,
    ):
        identity = await enrolled_with(SuperNodeKey.create(), operator, "nano-1")
        async with calling(served, identity) as device:
            agent = device.agent()
            await agent.greet(hello_of("nano-1", "orin-nano", "6f0c"))
            await agent.goodbye()
        await operator_pb2_grpc.OperatorServiceStub(operator.channel).ForgetDevices(
            operator_pb2.ForgetDevicesRequest(device_ids=["nano-1"])
        )
        found, _ = await supernodes(superlink)
        assert found == {}
        async with calling(served, identity) as device:
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked: enrol again"):
                await superlink_pb2_grpc.SuperLinkServiceStub(device.channel).GetSuperLink(
                    superlink_pb2.GetSuperLinkRequest()
                )


async def test_the_certificate_is_for_the_superlinks_addresses_only(
    settings: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    key = new_key()
    request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(key), hosts=["10.0.0.5"])
    async with serving(settings) as served, calling(served, fleet.identity(Role.SUPERLINK)) as superlink:
        service = superlink_pb2_grpc.SuperLinkServiceStub(superlink.channel)
        answer = await service.IssueServerCertificate(request)
        hosts = Certificate.from_pem(answer.certificate_pem).hosts
        assert set(hosts) == {"site.example", "10.0.0.5", "localhost", "127.0.0.1", "::1"}
        assert matches(key, answer.certificate_pem)
        _, first = await supernodes(superlink)
        assert answer.authority == first.authority
        for foreign in ("other.example", SERVER_NAME):
            request = superlink_pb2.IssueServerCertificateRequest(request_pem=request.request_pem, hosts=[foreign])
            with pytest.raises(grpc.aio.AioRpcError, match=".* is not a known address of the SuperLink"):
                await service.IssueServerCertificate(request)


async def test_only_a_superlink_gets_a_certificate_and_the_audit_log_says_who(
    settings: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(new_key()))
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        for role, name in ((Role.FLOWER, "anna"), (Role.OPERATOR, "bea"), (Role.SUPERLINK, "rack")):
            async with calling(served, fleet.identity(role, name)) as caller:
                issuing = superlink_pb2_grpc.SuperLinkServiceStub(caller.channel).IssueServerCertificate(request)
                if role is Role.SUPERLINK:
                    assert (await issuing).certificate_pem
                    continue
                with pytest.raises(grpc.aio.AioRpcError, match="may not call .*: use one of the role superlink"):
                    await issuing
        log = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        entries = [e async for part in log.ReadAuditLog(identity_pb2.ReadAuditLogRequest()) for e in part.entries]
    found = {each.caller: each.outcome for each in entries if each.method == "IssueServerCertificate"}
    assert found["superlink rack"] == "" and found["flower anna"].startswith("refused: ")


async def test_a_coordinator_that_was_not_told_says_how(config: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(new_key()))
    async with (
        serving(certified(config, fleet.authority.folder)) as served,
        calling(served, fleet.identity(Role.SUPERLINK)) as superlink,
    ):
        service = superlink_pb2_grpc.SuperLinkServiceStub(superlink.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="restart it with --superlink-address HOST:PORT"):
            await service.IssueServerCertificate(request)


async def test_a_superlink_needs_an_authority(config: CoordinatorSettings) -> None:
    with pytest.raises(InvalidInputError, match=r"--superlink-address needs an authority"):
        async with serving(config.with_values(superlink={"address": "site.example:8000"})):
            pass
