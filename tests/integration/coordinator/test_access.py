"""Which roles may call which RPC of a coordinator with an authority, over TLS."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.identity.access import ROLES, WITHOUT_CERTIFICATE
from coordinator.server import SERVICES
from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, calling, certified
from tests.fakes.served import Client, hello_of, serving
from wattfleet.errors import InvalidInputError
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_identity.peers import Role
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import planning_pb2, superlink_pb2, superlink_pb2_grpc, view_pb2

_DENIED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
_WITHIN_S = 20.0
_TRIES = 20
"""gRPC's client makes the status INTERNAL of a refusal that comes before it has written its request."""


@pytest.fixture
def secured(config: CoordinatorSettings, fleet: CertifiedFleet) -> CoordinatorSettings:
    return certified(config, fleet.authority.folder)


async def outcome(client: Client, method: str) -> grpc.StatusCode | None:
    """The error of a call with an empty request; None if it is answered by a message."""
    for _ in range(_TRIES):
        # On the wire, a unary call looks like a stream of one message.
        call: Any = client.channel.stream_stream(method)(iter([b""]), timeout=_WITHIN_S)
        try:
            if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                return None
        except grpc.aio.AioRpcError:
            pass
        finally:
            call.cancel()
        if (code := await call.code()) is not grpc.StatusCode.INTERNAL:
            return code  # type: ignore[no-any-return]
    return grpc.StatusCode.INTERNAL


async def refused_greeting(client: Client, device_id: str) -> grpc.aio.AioRpcError:
    """The status with which a device's session is refused."""
    for _ in range(_TRIES):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await greeted(client, device_id)
        if refused.value.code() is not grpc.StatusCode.INTERNAL:
            break
    return refused.value


async def greeted(client: Client, device_id: str, board: str = "agx-orin", installation: str = "") -> Any:
    agent = client.agent()
    await agent.greet(hello_of(device_id, board, installation))
    return agent


def test_every_served_rpc_has_a_row_and_every_row_an_rpc() -> None:
    served = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
    served.discard("/grpc.health.v1.Health/List")  # the Python service does not have this RPC
    assert served | {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"} == ROLES.keys()
    assert WITHOUT_CERTIFICATE <= ROLES.keys()


@pytest.mark.parametrize("role", Role)
async def test_a_role_may_call_exactly_the_rpcs_of_its_rows(
    secured: CoordinatorSettings, fleet: CertifiedFleet, role: Role
) -> None:
    async with serving(secured) as served, calling(served, fleet.identity(role)) as client:
        outcomes = {method: await outcome(client, method) for method in ROLES}
    allowed = {method for method, code in outcomes.items() if code not in _DENIED}
    assert allowed == {method for method, roles in ROLES.items() if role in roles}


async def test_without_a_certificate_only_enrolment_answers(
    secured: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    async with serving(secured) as served:
        async with calling(served, None) as client:
            assert await outcome(client, "/wattfleet.v1.ViewService/GetFleet") is grpc.StatusCode.UNAVAILABLE
        credentials = grpc.ssl_channel_credentials(fleet.authority.trusted_pem)
        options = [("grpc.ssl_target_name_override", "coordinator.wattfleet")]
        async with grpc.aio.secure_channel(served.bound.address, credentials, options) as channel:
            client = Client(served.bound, channel, served.stop, served.running)
            assert await outcome(client, "/wattfleet.v1.ViewService/GetFleet") is grpc.StatusCode.UNAVAILABLE
        assert served.bound.enrolment_address is not None
        async with grpc.aio.secure_channel(served.bound.enrolment_address, credentials, options) as channel:
            client = Client(served.bound, channel, served.stop, served.running)
            outcomes = {method: await outcome(client, method) for method in ROLES}
    assert {method for method, code in outcomes.items() if code not in _DENIED} == WITHOUT_CERTIFICATE


async def test_a_certificate_of_another_fleet_does_not_connect(
    secured: CoordinatorSettings, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    stranger = CertifiedFleet.create(tmp_path / "another").identity(Role.OPERATOR)
    posing = fleet.identity(Role.OPERATOR)
    async with serving(secured) as served:
        async with calling(served, stranger) as client:
            assert await outcome(client, "/wattfleet.v1.ViewService/GetFleet") is grpc.StatusCode.UNAVAILABLE
        async with calling(served, posing) as client:
            await client.view.GetFleet(view_pb2.GetFleetRequest())


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        ({"device_id": "nano"}, "the certificate is for the device 'orin', not 'nano'"),
        ({"device_id": "orin", "board": "orin-nano"}, "the certificate is for the board 'agx-orin', not 'orin-nano'"),
        (
            {"device_id": "orin", "installation": "another"},
            "the certificate is for the installation 'first', not 'another'",
        ),
    ],
)
async def test_a_device_is_only_what_its_certificate_says(
    secured: CoordinatorSettings, fleet: CertifiedFleet, claimed: dict[str, str], reason: str
) -> None:
    own = fleet.identity(Role.DEVICE, "orin", board="agx-orin", installation="first")
    async with serving(secured) as served, calling(served, own) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await greeted(client, **{"installation": "first", **claimed})
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert reason in str(refused.value.details())
        await greeted(client, "orin", installation="first")


async def test_a_device_takes_its_id_back_from_another_installation(
    secured: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    copy, own = (fleet.identity(Role.DEVICE, "orin", installation=each) for each in ("copy", "own"))
    async with serving(secured) as served, calling(served, copy) as former, calling(served, own) as client:
        replaced = await greeted(former, "orin", installation="copy")
        await greeted(client, "orin", installation="own")
        assert await replaced.call.code() is grpc.StatusCode.ABORTED


async def test_a_session_ends_when_its_certificate_expires(secured: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    long_lived = fleet.identity(Role.DEVICE, "orin")
    expiring = fleet.identity(Role.DEVICE, "nano", timedelta(seconds=3))
    quick = secured.with_values(sessions={"check_s": 0.1})
    async with serving(quick) as served, calling(served, long_lived) as one, calling(served, expiring) as other:
        orin, nano = await greeted(one, "orin"), await greeted(other, "nano")
        async with asyncio.timeout(_WITHIN_S):
            assert await nano.call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "expired" in await nano.call.details()
        assert utc_now() >= expiring.certificate.not_after
        await orin.lease()


async def test_operators_may_have_an_address_of_their_own(config: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    settings = certified(config, fleet.authority.folder, operator_address="127.0.0.1:0")
    operator = fleet.identity(Role.OPERATOR)
    request = view_pb2.GetFleetRequest()
    async with serving(settings) as served:
        async with calling(served, operator) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="use the address for operators"):
                await client.view.GetFleet(request)
        async with calling(served, operator, served.bound.operator_address) as client:
            await client.view.GetFleet(request)
        async with calling(served, fleet.identity(Role.DEVICE, "orin"), served.bound.operator_address) as client:
            refused = await refused_greeting(client, "orin")
            assert "does not serve the role device" in str(refused.details())


async def test_a_fleet_moves_over_through_a_plaintext_address(
    config: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    async with serving(settings) as served, calling(served, None, served.bound.plaintext_address) as plaintext:
        await greeted(plaintext, "orin")
        with pytest.raises(grpc.aio.AioRpcError, match="needs a certificate"):
            await plaintext.view.GetFleet(view_pb2.GetFleetRequest())
        async with calling(served, fleet.identity(Role.OPERATOR)) as operator:
            assert await operator.states() == {"orin": "enrolled"}


async def test_nobody_gets_a_servers_certificate_in_plaintext(
    config: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    settings = settings.with_values(superlink={"address": "site.example:8000"})
    async with serving(settings) as served, calling(served, None, served.bound.plaintext_address) as plaintext:
        service = superlink_pb2_grpc.SuperLinkServiceStub(plaintext.channel)
        request = superlink_pb2.IssueServerCertificateRequest(request_pem=request_certificate(new_key()))
        with pytest.raises(grpc.aio.AioRpcError, match="IssueServerCertificate needs a certificate"):
            await service.IssueServerCertificate(request)
        with pytest.raises(grpc.aio.AioRpcError, match="ListSuperNodes needs a certificate"):
            await service.ListSuperNodes(superlink_pb2.ListSuperNodesRequest()).read()


async def test_plaintext_on_other_machines_addresses_is_refused_unless_asked_for(config: CoordinatorSettings) -> None:
    exposed = config.with_values(server={"address": "0.0.0.0:0"})
    with pytest.raises(InvalidInputError, match=r"`wattfleet coordinator init`, or pass --insecure"):
        async with serving(exposed):
            pass


async def test_a_run_belongs_to_the_certificate_that_started_it(
    secured: CoordinatorSettings, fleet: CertifiedFleet
) -> None:
    request = planning_pb2.StartRunRequest(run_id="mine", strategy="FedAvg", rounds=3, run_token="known to both")
    owner, other = fleet.identity(Role.FLOWER, "mine"), fleet.identity(Role.FLOWER, "other")
    async with serving(secured) as served:
        async with calling(served, owner) as client:
            await client.planning.StartRun(request)
        async with calling(served, other) as client:
            with pytest.raises(grpc.aio.AioRpcError, match="was started by another app"):
                await client.planning.StartRun(request)
        async with calling(served, owner) as client:
            await client.planning.StartRun(request)


async def test_a_run_of_plaintext_goes_on_over_tls(config: CoordinatorSettings, fleet: CertifiedFleet) -> None:
    settings = certified(config, fleet.authority.folder, plaintext_address="127.0.0.1:0")
    request = planning_pb2.StartRunRequest(run_id="mine", strategy="FedAvg", rounds=3, run_token="secret")
    async with serving(settings) as served:
        async with calling(served, None, served.bound.plaintext_address) as client:
            await client.planning.StartRun(request)
        async with calling(served, fleet.identity(Role.FLOWER)) as client:
            await client.planning.StartRun(request)
            request.run_token = "another"
            with pytest.raises(grpc.aio.AioRpcError, match="was started by another app"):
                await client.planning.StartRun(request)
