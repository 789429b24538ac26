"""References are published, pinned and unpinned in any order during rounds: no run ends, and no agent is lost."""

from __future__ import annotations

import itertools

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import READY, Agent, Client, serving_client
from tests.fakes.small_fleet import ORIN_FRONT, ORIN_NODE, RUN
from wattfleet.modes import FittedWorkload
from wattfleet.prediction import Artefact, pack_artefact, restore_predictor
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, power_pb2, session_pb2

BERT = power_pb2.Workload(name="bert")
ORDERS = sorted(set(itertools.permutations(("publish", "pin", "unpin", "pin"))))
SHORT_FORM = (
    ("publish", "pin", "unpin", "pin"),
    ("pin", "unpin", "publish", "pin"),
    ("publish", "pin", "pin", "unpin"),
)
"""The rest are slow forms: each step of theirs is one of these."""


def of_another_workload(artefact: Artefact) -> Artefact:
    """The same predictor under the name of a workload that no run trains."""
    return pack_artefact(restore_predictor(artefact), FittedWorkload("speech", 8, 10), "orin-nx", {}, {})


class Operator:
    """Performs an operator's actions on references; one that is impossible now is refused, and changes nothing."""

    def __init__(self, client: Client, artefact: Artefact) -> None:
        self._client, self._artefact = client, artefact

    async def do(self, what: str) -> int:
        """Perform an action; returns the number of sessions that end."""
        try:
            if what == "publish":
                parts = [
                    operator_pb2.PublishReferenceRequest(manifest=self._artefact.manifest),
                    operator_pb2.PublishReferenceRequest(weights_chunk=self._artefact.weights),
                ]
                await self._client.operator.PublishReference(iter(parts))
                return 0
            digest = self._artefact.digest if what == "pin" else ""
            answer = await self._client.operator.PinReference(operator_pb2.PinReferenceRequest(digest=digest))
            return int(answer.ended_sessions)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND, "a reference that was not published"
            return 0


async def connected(client: Client) -> tuple[Agent, str]:
    """A device that is ready with its front and the reference that it is told to use."""
    agent = client.agent()
    digest = (await agent.hello("orin")).reference_digest
    await agent.lease()
    front = session_pb2.FrontReport(
        front=front_to_message(ORIN_FRONT), idle_w=5.0, reference_digest=digest, workload=BERT, minibatches_per_epoch=9
    )
    await agent.send(front=front)
    await agent.send(state=READY)
    return agent, digest


@pytest.mark.parametrize(
    "order",
    [each if each in SHORT_FORM else pytest.param(each, marks=pytest.mark.slow) for each in ORDERS],
    ids="-".join,
)
async def test_no_order_of_references_ends_a_run_or_an_agent(
    config: CoordinatorSettings, artefact: Artefact, order: tuple[str, ...]
) -> None:
    async with serving_client(config) as client:
        operator = Operator(client, of_another_workload(artefact))
        request = planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=9, workload=BERT)
        await client.planning.StartRun(request)
        binding = planning_pb2.NodeBinding(node_id=ORIN_NODE, device_id="orin")
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=[binding]))
        agent, digest = await connected(client)
        for number, what in enumerate(order, 1):
            ask = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=[ORIN_NODE], epochs=1.0)
            plan = await client.planning.PlanRound(ask)
            assert [each.device_id for each in plan.assignments] == ["orin"]
            if await operator.do(what):  # while the round is in progress
                with pytest.raises(grpc.aio.AioRpcError):
                    await agent.hear(agent.profile_orders)  # no input is given: it reads until the end
                assert await agent.call.code() is grpc.StatusCode.UNAVAILABLE, "an agent connects again after this"
                agent, digest = await connected(client)
            grant = await agent.grant()
            assert grant.plan_id == plan.plan_id and grant.HasField("mode"), "the training goes on"
            await agent.lease(GrantPhase.OVER, grant)
            await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=1.0))
        pinned = [what for what in order[order.index("publish") :] if what != "publish"]
        is_in_force = bool(pinned) and pinned[-1] == "pin"
        assert (digest == of_another_workload(artefact).digest) is is_in_force
