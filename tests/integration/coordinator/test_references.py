"""References that the operator publishes and pins."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from coordinator.errors import StoreFullError
from coordinator.services import operations
from coordinator.settings import CoordinatorSettings
from coordinator.state.records import StoredRecord
from coordinator.store.store import Store
from tests.fakes.served import Client, fetch, serving_client, status
from tests.fakes.small_fleet import ORIN_FRONT
from wattfleet.prediction import Artefact
from wattfleet_proto.v1 import operator_pb2, session_pb2


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


async def references(client: Client) -> dict[str, operator_pb2.ReferenceView]:
    answer = await client.operator.ListReferences(operator_pb2.ListReferencesRequest())
    return {view.digest: view for view in answer.references}


async def test_a_published_reference_is_handed_out_and_the_same_again_changes_nothing(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:

    async with serving_client(config) as client:
        assert set(await references(client)) == {artefact.digest}
        published = await publish(client, another)
        assert (published.digest, published.known) == (another.digest, False)
        assert (await publish(client, another, 100_000)).known
        listed = await references(client)
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
        assert set(await references(client)) == {artefact.digest}


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
            front=(await client.devices())["orin"].front, idle_w=5.0, reference_digest=another.digest
        )
        await back.send(front=report)
        listed = await references(client)
        assert (listed[another.digest].device_count, listed[artefact.digest].device_count) == (1, 0)
        assert (await pin(client, another.digest)).ended_sessions == 0, "it was already counted"
        await back.send(lease=session_pb2.Lease())

    async def second(client: Client) -> None:
        agent = client.agent()
        assert (await agent.hello("orin")).reference_digest == another.digest
        view = (await references(client))[another.digest]
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
        assert all(view.pinned and view.in_force for view in (await references(client)).values())
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
        assert len(await references(client)) == 2


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
        assert (await references(client))[artefact.digest].in_force
