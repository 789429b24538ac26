"""Every RPC of a coordinator receives hostile requests; other devices and apps are not affected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import descriptor_pool

from coordinator.settings import CoordinatorSettings, PeerSettings, PolicySettings
from tests.fakes.coordinator_in_process import on_loop
from tests.fakes.served import READY, Agent, Client, serving
from tests.fakes.small_fleet import NANO_FRONT, ORIN_FRONT
from tests.fuzz.campaign import Campaign, bounded_memory, service_log
from tests.fuzz.coordinator_requests import DEVICES, KNOWN_NODES, RUN, WORKLOAD, known_values, valid_calls
from tests.fuzz.remote_calls import HostileCall, Method, methods_of, offered_services
from wattfleet.core.prediction import Artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import operator_pb2, planning_pb2, power_pb2, session_pb2

SERVICES = {
    "wattfleet.v1.SessionService": PolicySettings(name="progress"),
    "wattfleet.v1.PlanningService": PolicySettings(name="oort"),
    "wattfleet.v1.OperatorService": PolicySettings(name="deadline", deadline_s=1000.0),
    "wattfleet.v1.IdentityService": PolicySettings(name="all"),
    "wattfleet.v1.ViewService": PolicySettings(name="fair"),
    "grpc.health.v1.Health": PolicySettings(name="tiers"),
    "grpc.reflection.v1alpha.ServerReflection": PolicySettings(name="random"),
}
"""The services, each with a policy to plan by."""

_NOT_SET_UP = {
    f"/wattfleet.v1.{method}"
    for method in (
        "SessionService/FetchMetadata",
        "OperatorService/GetMetadata",
        "OperatorService/PublishMetadata",
        "OperatorService/SetCharge",
        "IdentityService/Invite",
        "IdentityService/ListInvites",
        "IdentityService/CancelInvite",
        "IdentityService/ListCertificates",
        "IdentityService/IssueCertificate",
        "IdentityService/RevokeCertificates",
        "IdentityService/BeginRotation",
        "IdentityService/FinishRotation",
    )
}
"""Refused by a coordinator without an authority and without signed references."""

_HONEST_RUN, _TOKEN = "honest", "a token that nobody knows"
_HONEST = {"honest-orin": (2**62 + 1, ORIN_FRONT), "honest-nano": (2**62 + 2, NANO_FRONT)}
_ANSWERS_WITHIN_S = 20.0


class HonestSite:
    """Two devices and an app that follow the protocol, while a hostile peer is connected.

    Args:
        client: the coordinator.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._round = 0

    async def begin(self) -> None:
        await self._connect()
        bindings = [planning_pb2.NodeBinding(node_id=node, device_id=name) for name, (node, _) in _HONEST.items()]
        await self._client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        await self._client.planning.StartRun(
            planning_pb2.StartRunRequest(run_id=_HONEST_RUN, strategy="FedAvg", rounds=1_000, run_token=_TOKEN)
        )

    async def plan_round(self) -> None:
        """Make sure that a round can be planned as usual."""
        await self._connect()
        # The hostile peer is an operator, too.
        await self._client.operator.SetBudget(operator_pb2.SetBudgetRequest(supply="site", watts=1e6))
        await self._client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=[*_HONEST], undo=True))
        self._round += 1
        plan = await self._client.planning.PlanRound(
            planning_pb2.PlanRoundRequest(
                run_id=_HONEST_RUN,
                round=self._round,
                node_ids=[node for node, _ in _HONEST.values()],
                epochs=1.0,
                run_token=_TOKEN,
            )
        )
        assert plan.assignments, [(decision.device_id, decision.reason) for decision in plan.decisions]
        results = [planning_pb2.DeviceResult(device_id=each.device_id, share=1.0) for each in plan.assignments]
        await self._client.planning.FinishRound(
            planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=40.0, results=results, run_token=_TOKEN)
        )

    async def _connect(self) -> None:
        """Begin new sessions, since the hostile peer may have pinned a reference."""
        self._client.agents.clear()
        for name, (_, front) in _HONEST.items():
            agent: Agent = self._client.agent()
            hello = session_pb2.Hello(
                device_id=name, board="agx-orin", provenance=power_pb2.PROVENANCE_SIMULATED, mode_count=7,
                protocol=own_version(), installation=f"installation of {name}",
            )  # fmt: skip
            await agent.greet(hello)
            await agent.lease()
            await agent.send(
                front=session_pb2.FrontReport(front=front_to_message(front), idle_w=3.0, minibatches_per_epoch=100)
            )
            await agent.send(state=READY)


@asynccontextmanager
async def attacked(settings: CoordinatorSettings) -> AsyncIterator[Client]:
    """A coordinator, with the devices and runs that hostile requests refer to."""
    peers = PeerSettings(requests_per_s=1e6)  # otherwise most requests are refused because of the number alone
    async with serving(settings.model_copy(update={"peers": peers})) as client:
        for number, name in enumerate(DEVICES):
            agent, front = client.agent(), ORIN_FRONT if number % 2 else NANO_FRONT
            await agent.become_ready(name, front, 4.0, WORKLOAD.name)
            await agent.send(front=session_pb2.FrontReport(front=front_to_message(front), idle_w=4.0))
        nodes = [
            planning_pb2.NodeBinding(node_id=node, device_id=name)
            for node, name in zip(KNOWN_NODES, DEVICES, strict=True)
        ]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=nodes))
        for run in (RUN, "4712"):
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run, strategy="FedAvg", rounds=100))
        yield client


@pytest.mark.parametrize("service", SERVICES)
def test_no_request_fails_the_coordinator(
    service: str, config: CoordinatorSettings, artefact: Artefact, campaign: Campaign
) -> None:
    on_loop(_no_request_fails_the_coordinator(service, config, artefact, campaign)).result()


async def _no_request_fails_the_coordinator(
    service: str, config: CoordinatorSettings, artefact: Artefact, campaign: Campaign
) -> None:
    settings = config.model_copy(update={"policy": SERVICES[service]})
    methods = methods_of(descriptor_pool.Default().FindServiceByName(service))
    valid, known = valid_calls(artefact), known_values(artefact)
    with service_log() as log:
        async with attacked(settings) as client:
            honest = HonestSite(client)
            await honest.begin()
            await honest.plan_round()
            with grpc.insecure_channel(client.bound.address) as channel:
                with bounded_memory():
                    for hostile in campaign.inputs(at_least=len(methods)):
                        call = HostileCall.drawn(hostile, methods[campaign.seed % len(methods)], valid, known)
                        with campaign.judged(call, log):
                            await call.ended_with(channel)
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                await honest.plan_round()


def test_every_rpc_is_fuzzed(config: CoordinatorSettings, artefact: Artefact) -> None:
    on_loop(_every_rpc_is_fuzzed(config, artefact)).result()


async def _every_rpc_is_fuzzed(config: CoordinatorSettings, artefact: Artefact) -> None:
    async with serving(config) as client:
        services = await offered_services(client.channel)
    assert {service.full_name for service in services} == set(SERVICES), "add the service to SERVICES"
    offered = {method.path for service in services for method in methods_of(service)}
    assert offered == set(valid_calls(artefact)), "add a valid request of the RPC to valid_calls"


def test_valid_requests_reach_the_coordinator(config: CoordinatorSettings, artefact: Artefact) -> None:
    on_loop(_valid_requests_reach_the_coordinator(config, artefact)).result()


async def _valid_requests_reach_the_coordinator(config: CoordinatorSettings, artefact: Artefact) -> None:
    refused = []
    async with attacked(config) as client:
        channel = grpc.insecure_channel(client.bound.address)
        for path, calls in valid_calls(artefact).items():
            for messages in calls:
                method = Method(path, messages[0].DESCRIPTOR, takes_stream=False)
                call = HostileCall(method, [message.SerializeToString() for message in messages], goes_away=False)
                code = await call.ended_with(channel)
                if code is not grpc.StatusCode.OK:
                    refused.append((path, code))
    assert {path for path, _ in refused} <= _NOT_SET_UP, refused
