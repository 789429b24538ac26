"""Long-lasting calls end within seconds once their certificate is revoked or expires, for every RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.identity.access import STREAMS, LiveCalls
from coordinator.server import SERVICES
from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, calling, certified, joined
from tests.fakes.served import Client, hello_of, serving
from wattfleet_identity.certificates import InvalidCertificateError
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.joining import Applicant
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc, operator_pb2, view_pb2

_WITHIN_S = 5.0


def test_every_stream_ends_with_its_certificate() -> None:
    streams = {
        f"/{service.full_name}/{method.name}"
        for service in SERVICES
        for method in service.methods
        if method.server_streaming or method.client_streaming
    }
    assert streams | {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"} == STREAMS


async def watched(client: Client) -> Any:
    call = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    return call


async def session(client: Client) -> Any:
    agent = client.agent()
    await agent.greet(hello_of("peer"))
    return agent.call


async def upload(client: Client) -> Any:
    async def endless() -> AsyncIterator[operator_pb2.PublishReferenceRequest]:
        yield operator_pb2.PublishReferenceRequest(manifest=b"{}")
        await asyncio.Event().wait()

    call = client.operator.PublishReference(endless())
    await client.view.GetFleet(view_pb2.GetFleetRequest())  # the upload has begun
    return call


async def reflection(client: Client) -> Any:
    call = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await call.read()
    return call


@pytest.mark.parametrize(
    ("role", "begin"),
    [(Role.VIEWER, watched), (Role.DEVICE, session), (Role.OPERATOR, upload), (Role.OPERATOR, reflection)],
)
async def test_a_revoked_peers_calls_end(config: CoordinatorSettings, tmp_path: Path, role: Role, begin: Any) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    async with (
        serving(certified(config, fleet.authority.folder)) as served,
        calling(served, fleet.identity(Role.OPERATOR, "anna")) as operator,
    ):
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        name = "" if role is Role.DEVICE else "peer"
        peer = await joined(service, role, Applicant("peer", "agx-orin"), name)
        async with calling(served, peer) as client, asyncio.timeout(60):
            call = await begin(client)
            others = await watched(operator)
            await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="peer"))
            async with asyncio.timeout(_WITHIN_S):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "was revoked" in await call.details()
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # on the same connection
                await client.view.GetFleet(view_pb2.GetFleetRequest())
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert not others.done()
            others.cancel()


async def test_an_operator_may_revoke_its_own_certificate(config: CoordinatorSettings, tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(fleet.authority.folder / "operator", fleet.identity(Role.OPERATOR, "anna"))
    async with serving(certified(config, fleet.authority.folder)) as served:
        async with calling(served, fleet.identity(Role.OPERATOR, "bea")) as client:
            service = identity_pb2_grpc.IdentityServiceStub(client.channel)
            answer = await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="anna"))
    assert [each.name for each in answer.certificates] == ["anna"]


async def test_a_caller_that_leaves_is_not_told_of_its_certificate(tmp_path: Path) -> None:
    calls, certificate = LiveCalls(), CertifiedFleet.create(tmp_path / "a").identity(Role.VIEWER).certificate
    seen: list[BaseException] = []

    async def call() -> None:
        try:
            with calls.holding(certificate, lambda _: None):
                await asyncio.Event().wait()
        except BaseException as error:
            seen.append(error)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert calls.end_invalid() == 0
    task.cancel()
    await task
    assert [type(each) for each in seen] == [asyncio.CancelledError]


async def test_a_call_is_ended_once(tmp_path: Path) -> None:
    calls, certificate = LiveCalls(), CertifiedFleet.create(tmp_path / "a").identity(Role.VIEWER).certificate
    cleaned_up = []

    def refuse(_: object) -> None:
        raise InvalidCertificateError("it was revoked")

    async def call() -> None:
        with calls.holding(certificate, refuse):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)  # like the cleanup of a session
                cleaned_up.append(True)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert calls.end_invalid() == 1
    await asyncio.sleep(0)
    assert calls.end_invalid() == 0
    with pytest.raises(InvalidCertificateError, match="revoked"):
        await task
    assert cleaned_up, "a second check does not interrupt it"
