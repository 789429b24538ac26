"""References that the operator publishes, pins and signs: in any order during rounds, and at a limited cost."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import reference_models
from coordinator.errors import StoreFullError
from coordinator.references import published
from coordinator.references.check import check_in_child
from coordinator.references.metadata import ReferenceMetadata, key_of_pem, utc_now
from coordinator.references.published import MAX_REFERENCES
from coordinator.references.signing_folder import SigningFolder
from coordinator.services import operations
from coordinator.settings import CoordinatorSettings
from coordinator.state.records import StoredRecord
from coordinator.store.store import Store
from tests.fakes.served import READY, Agent, Client, asked, command, fetch, served_with_shell, serving_client, status
from tests.fakes.signed_repository import BEGIN, SignedRepository, TrustingDevice, VirtualClock, reference
from tests.fakes.small_fleet import ORIN_FRONT, ORIN_NODE, RUN
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import FittedWorkload, board_named
from wattfleet.core.prediction import Artefact, RooflinePredictor, pack_artefact, restore_predictor, write_artefact
from wattfleet.core.prediction.roofline import settings_of
from wattfleet.core.prediction.roofline.estimation import Correction, Points, Process, Remainder, Surface
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.limits import MAX_MANIFEST_BYTES
from wattfleet_proto.v1 import operator_pb2, planning_pb2, power_pb2, session_pb2

# --- References -------------------------------------------------------------------------------------------------------
# References that the operator publishes and pins.


async def publish(client: Client, artefact: Artefact, chunk: int = 1000) -> operator_pb2.PublishReferenceResponse:
    return await publish_parts(client, artefact.manifest, artefact.weights, chunk)


async def publish_parts(
    client: Client, manifest: bytes, weights: bytes, chunk: int = 1000
) -> operator_pb2.PublishReferenceResponse:
    async def parts() -> AsyncIterator[operator_pb2.PublishReferenceRequest]:
        yield operator_pb2.PublishReferenceRequest(manifest=manifest)
        for offset in range(0, len(weights), chunk):
            yield operator_pb2.PublishReferenceRequest(weights_chunk=weights[offset : offset + chunk])

    return await client.operator.PublishReference(parts())


async def pin(client: Client, digest: str, *further: str) -> operator_pb2.PinReferenceResponse:
    request = operator_pb2.PinReferenceRequest(digest=digest, further_digests=further)
    return await client.operator.PinReference(request)


async def listed_references(client: Client) -> dict[str, operator_pb2.ReferenceView]:
    answer = await client.operator.ListReferences(operator_pb2.ListReferencesRequest())
    return {view.digest: view for view in answer.references}


async def test_a_published_reference_is_handed_out_and_the_same_again_changes_nothing(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:

    async with serving_client(config) as client:
        assert set(await listed_references(client)) == {artefact.digest}
        published = await publish(client, another)
        assert (published.digest, published.known) == (another.digest, False)
        assert (await publish(client, another, 100_000)).known
        listed = await listed_references(client)
        assert listed[artefact.digest].in_force and listed[artefact.digest].from_start
        view = listed[another.digest]
        assert (view.in_force, view.pinned, view.from_start, view.device_count) == (False, False, False, 0)
        assert (view.workload, view.board, view.predictor) == ("resnet18-imagenet", "agx-orin", "roofline")
        assert view.size_bytes == len(another.manifest) + len(another.weights)
    async with serving_client(config) as client:
        parts = [part async for part in client.sessions.FetchReference(fetch(another.digest))]
        assert parts[0].manifest == another.manifest
        assert b"".join(part.weights_chunk for part in parts) == another.weights
        assert (await publish(client, another)).known


async def test_a_reference_that_could_not_be_stored_is_not_said_to_be(
    config: CoordinatorSettings, another: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, save = [True], Store.save

    def save_where_there_is_room(store: Store, *records: StoredRecord) -> None:
        if not room[-1]:
            raise StoreFullError("the disk is full")
        save(store, *records)

    monkeypatch.setattr(Store, "save", save_where_there_is_room)

    async with serving_client(config) as client:
        room.append(False)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await publish(client, another)
            assert status(refused)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        room.append(True)
        assert not (await publish(client, another)).known
        assert (await publish(client, another)).known
    store = Store(Path(config.store.location))
    assert [each.digest for each in store.load().references] == [another.digest]
    store.close()


async def test_a_damaged_reference_is_refused(
    config: CoordinatorSettings, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = bytearray(artefact.weights)
    damaged[len(damaged) // 2] ^= 1
    no_predictor = json.loads(artefact.manifest)
    no_predictor["predictor"] = "crystal-ball"

    async with serving_client(config) as client:
        for manifest, weights, code, text in (
            (artefact.manifest, bytes(damaged), grpc.StatusCode.DATA_LOSS, "has the SHA-256"),
            (artefact.manifest, artefact.weights[:-1], grpc.StatusCode.DATA_LOSS, "bytes instead of"),
            (artefact.manifest[:-9], artefact.weights, grpc.StatusCode.DATA_LOSS, "manifest.json is damaged"),
            (b"", artefact.weights, grpc.StatusCode.DATA_LOSS, "manifest.json is damaged"),
            (
                json.dumps(no_predictor).encode(),
                artefact.weights,
                grpc.StatusCode.INVALID_ARGUMENT,
                "unknown predictor 'crystal-ball'",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await publish_parts(client, manifest, weights)
            assert status(refused)[0] is code and text in status(refused)[1]
        monkeypatch.setattr(operations, "MAX_WEIGHTS_BYTES", 1024)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await publish(client, artefact)
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT and "must not exceed" in status(refused)[1]
        assert set(await listed_references(client)) == {artefact.digest}


async def test_agents_come_back_to_a_pinned_reference_and_a_restart_keeps_it(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:

    async def first(client: Client) -> None:
        agent = client.agent()
        await agent.become_ready("orin", ORIN_FRONT, 5.0)
        await publish(client, another)
        pinned = await pin(client, another.digest[:8].upper())
        assert (pinned.digest, pinned.ended_sessions) == (another.digest, 1)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await agent.call.read()
        assert status(ended)[0] is grpc.StatusCode.UNAVAILABLE and "reconnect to fetch it" in status(ended)[1]
        back = client.agent()
        assert (await back.hello("orin")).reference_digest == another.digest
        report = session_pb2.FrontReport(
            front=(await client.devices())["orin"].front,
            idle_w=5.0,
            reference_digest=another.digest,
            minibatches_per_epoch=100,
        )
        await back.send(front=report)
        listed = await listed_references(client)
        assert (listed[another.digest].device_count, listed[artefact.digest].device_count) == (1, 0)
        assert (await pin(client, another.digest)).ended_sessions == 0, "it was already counted"
        await back.send(lease=session_pb2.Lease())

    async def second(client: Client) -> None:
        agent = client.agent()
        assert (await agent.hello("orin")).reference_digest == another.digest
        view = (await listed_references(client))[another.digest]
        assert view.pinned and view.in_force
        assert (await pin(client, "")).digest == artefact.digest

    async def third(client: Client) -> None:
        assert (await client.agent().hello("orin")).reference_digest == artefact.digest

    for story in (first, second, third):
        async with serving_client(config) as client:
            await story(client)


async def test_several_references_are_pinned_in_order_and_a_restart_keeps_them(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:

    async def told(client: Client) -> list[str]:
        welcome = await client.agent().hello("orin")
        return [welcome.reference_digest, *welcome.further_reference_digests]

    async with serving_client(config) as client:
        await publish(client, another)
        pinned = await pin(client, another.digest[:8], artefact.digest[:8], another.digest[:9])
        assert [pinned.digest, *pinned.further_digests] == [another.digest, artefact.digest]
        assert all(view.pinned and view.in_force for view in (await listed_references(client)).values())
        for digests, text in (
            (["0000000"], "no reference predictor's digest begins with '0000000'"),
            ([another.digest] * 4, "5 references are too many: pin at most 4"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=text):
                await pin(client, artefact.digest, *digests)
        with pytest.raises(grpc.aio.AioRpcError, match="the first digest is empty, but others are given"):
            await pin(client, "", artefact.digest)
        assert await told(client) == [another.digest, artefact.digest], "a refused request changes nothing"
    async with serving_client(config) as client:
        assert await told(client) == [another.digest, artefact.digest]
        with pytest.raises(grpc.aio.AioRpcError, match="is pinned: unpin it first"):
            await client.operator.RemoveReference(operator_pb2.RemoveReferenceRequest(digest=another.digest))
        await pin(client, "")
        assert await told(client) == [artefact.digest]


async def test_a_pinned_reference_of_the_start_outlasts_a_start_with_another(
    config: CoordinatorSettings, artefact: Artefact
) -> None:

    async with serving_client(config) as client:
        await pin(client, artefact.digest)
    async with serving_client(config.with_values(profiling={"reference": "agx_orin_resnet18"})) as client:
        assert (await client.agent().hello("orin")).reference_digest == artefact.digest
        assert len(await listed_references(client)) == 2


async def test_a_digest_that_is_not_there_cannot_be_pinned(config: CoordinatorSettings, artefact: Artefact) -> None:

    async with serving_client(config) as client:
        # It would take long to find two with the same first characters.
        for digest, code, text in (
            ("0" * 64, grpc.StatusCode.NOT_FOUND, "publish it first"),
            (artefact.digest[:5], grpc.StatusCode.INVALID_ARGUMENT, "at least 6 characters"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pin(client, digest)
            assert status(refused)[0] is code and text in status(refused)[1]
        assert (await listed_references(client))[artefact.digest].in_force


# --- Reference orders -------------------------------------------------------------------------------------------------
# References are published, pinned and unpinned in any order during rounds: no run ends, and no agent is lost.

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


# --- Reference limits -------------------------------------------------------------------------------------------------
# The cost of a published reference: memory and time of the coordinator, and of every agent that fetches it.

KIB = 1024
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
SETTINGS = settings_of(board_named("agx-orin").space.array(), None)


def settings_rows(count: int) -> Any:
    return SETTINGS[np.arange(count) % len(SETTINGS)]


def with_remainders(
    artefact: Artefact, inducing: int, corrections: int, workload: str = "resnet18-imagenet"
) -> Artefact:
    """A reference whose remainders have the given numbers of inducing and of correcting modes."""
    fitted = RooflinePredictor.load(artefact.weights)

    def remainder(parameters: int) -> Remainder:
        k = parameters + 1
        return Remainder(
            0.5,
            Surface(settings_rows(inducing), np.full(inducing, 1e-3)),
            Correction(
                Process(0.01, 0.01),
                Points(settings_rows(corrections), np.zeros(corrections)),
                np.full((corrections, k), 1e-3),
                0.1 * np.eye(k),
                np.full(corrections, 0.01),
                np.full(corrections, 1e-3),
            ),
        )

    hypothesis = replace(
        fitted.likeliest,
        probability=1.0,
        time_remainder=remainder(len(fitted.likeliest.time.log())),
        power_remainder=remainder(len(fitted.likeliest.power.log())),
    )
    large = replace(fitted, hypotheses=(hypothesis,))
    return pack_artefact(large, FittedWorkload(workload, 16, 3125), "agx-orin", {"made": "for tests"}, {})


async def publish_in_large_parts(client: Client, artefact: Artefact) -> operator_pb2.PublishReferenceResponse:
    async def parts() -> AsyncIterator[operator_pb2.PublishReferenceRequest]:
        yield operator_pb2.PublishReferenceRequest(manifest=artefact.manifest)
        for offset in range(0, len(artefact.weights), 500_000):
            yield operator_pb2.PublishReferenceRequest(weights_chunk=artefact.weights[offset : offset + 500_000])

    answer: operator_pb2.PublishReferenceResponse = await client.operator.PublishReference(parts())
    return answer


async def refused(client: Client, artefact: Artefact) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await publish_in_large_parts(client, artefact)
    return status(error)


@pytest.mark.parametrize(
    ("inducing", "corrections", "text"),
    [(401, 10, "400 inducing"), (10, 201, "at most 200"), (10, 6_000, "6,000 correcting")],
)
async def test_a_reference_with_many_modes_is_refused(
    config: CoordinatorSettings, artefact: Artefact, inducing: int, corrections: int, text: str
) -> None:
    async with serving_client(config) as client:
        code, details = await refused(client, with_remainders(artefact, inducing, corrections))
    assert code is grpc.StatusCode.DATA_LOSS and text in details


async def test_the_largest_reference_is_accepted(config: CoordinatorSettings, artefact: Artefact) -> None:
    async with serving_client(config) as client:
        assert not (await publish_in_large_parts(client, with_remainders(artefact, 400, 200))).known


async def test_the_shipped_references_are_accepted(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        for name in reference_models.shipped():
            assert (await publish_in_large_parts(client, reference_models.load(name))).digest == reference_models.load(
                name
            ).digest


async def test_a_check_that_needs_too_much_memory_fails_in_its_own_process(
    config: CoordinatorSettings, another: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "check_in_child", partial(check_in_child, memory_bytes=0))
    async with serving_client(config) as client:
        code, text = await refused(client, another)
        assert code is grpc.StatusCode.DATA_LOSS and "memory" in text
        await client.agent().hello("orin")


async def test_no_more_than_32_references_are_kept_until_one_is_removed(
    config: CoordinatorSettings, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "check_in_child", lambda artefact: None)  # one process for each would be slow
    async with serving_client(config) as client:
        made = [with_remainders(artefact, 1, 1, f"workload-{k}") for k in range(MAX_REFERENCES)]
        for each in made[:-1]:
            await publish_in_large_parts(client, each)
        code, text = await refused(client, made[-1])
        assert code is EXHAUSTED and "32 reference predictors" in text and "reference remove" in text
        assert (await publish_in_large_parts(client, made[0])).known
        await client.operator.RemoveReference(operator_pb2.RemoveReferenceRequest(digest=made[0].digest[:12]))
        assert not (await publish_in_large_parts(client, made[-1])).known
    async with serving_client(config) as client:
        listed = await client.operator.ListReferences(operator_pb2.ListReferencesRequest())
        digests = {each.digest for each in listed.references}
        assert made[0].digest not in digests and made[-1].digest in digests


async def test_a_reference_in_use_is_not_removed(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:
    async with serving_client(config) as client:
        await publish_in_large_parts(client, another)
        await client.operator.PinReference(operator_pb2.PinReferenceRequest(digest=another.digest))
        for digest, text in ((another.digest, "unpin"), (artefact.digest, "--reference")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.operator.RemoveReference(operator_pb2.RemoveReferenceRequest(digest=digest))
            assert status(error)[0] is INVALID and text in status(error)[1]


async def test_a_large_manifest_is_refused(config: CoordinatorSettings, artefact: Artefact) -> None:
    content = json.loads(artefact.manifest)
    content["provenance"]["note"] = "x" * MAX_MANIFEST_BYTES
    async with serving_client(config) as client:
        code, text = await refused(client, Artefact(json.dumps(content).encode(), artefact.weights))
    assert code is INVALID and "manifest" in text


@pytest.mark.parametrize("field", ["board", "predictor"])
async def test_names_in_a_manifest_have_at_most_200_characters(
    config: CoordinatorSettings, artefact: Artefact, field: str
) -> None:
    content = {**json.loads(artefact.manifest), field: "x" * 201}
    async with serving_client(config) as client:
        code, text = await refused(client, Artefact(json.dumps(content).encode(), artefact.weights))
    assert code is INVALID and "200" in text and len(text) < 1000


async def half_sent(client: Client, artefact: Artefact) -> Any:
    call = client.operator.PublishReference()
    await call.write(operator_pb2.PublishReferenceRequest(manifest=artefact.manifest))
    await call.write(operator_pb2.PublishReferenceRequest(weights_chunk=bytes(1000 * KIB)))
    return call


async def test_of_forty_half_sent_publishes_of_one_peer_one_is_kept(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:
    async with serving_client(config) as client:
        first = await half_sent(client, artefact)
        await asyncio.sleep(0.1)
        answers = [await refused(client, another) for _ in range(40)]
        told = [code is EXHAUSTED and "another upload" in text for code, text in answers]
        # gRPC's client rarely tells INTERNAL, if the server ends a call while the client is still sending.
        assert told.count(False) <= 2 and {code for code, _ in answers} <= {EXHAUSTED, grpc.StatusCode.INTERNAL}
        first.cancel()
        await asyncio.sleep(0.1)
        assert not (await publish_in_large_parts(client, another)).known


async def test_a_publish_that_takes_too_long_ends(
    config: CoordinatorSettings, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "UPLOAD_S", 0.2)
    async with serving_client(config) as client:
        call = await half_sent(client, artefact)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert status(error)[0] is grpc.StatusCode.ABORTED and "within 0.2 s" in status(error)[1]


def test_a_stored_predictor_of_an_agent_keeps_its_399_corrections(artefact: Artefact, tmp_path: Path) -> None:
    large = with_remainders(artefact, 400, 399)
    assert len(RooflinePredictor.load(large.weights).likeliest.time_remainder.correction.weights) == 399


def test_the_coordinator_imports_no_scipy_since_only_the_check_predicts() -> None:
    code = "import sys, coordinator.server, coordinator.cli.commands; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- Signed references ------------------------------------------------------------------------------------------------
# The operator's commands that sign references, and what a coordinator serves of them.


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
