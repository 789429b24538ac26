"""The cost of a published reference: memory and time of the coordinator, and of every agent that fetches it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import reference_models
from coordinator import references
from coordinator.reference_check import check_in_child
from coordinator.references import MAX_REFERENCES
from coordinator.services import operations
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client, serving_client, status
from wattfleet.modes import FittedWorkload, board_named
from wattfleet.prediction import Artefact, RooflinePredictor, pack_artefact
from wattfleet.prediction.roofline import settings_of
from wattfleet.prediction.roofline.estimation import Correction, Points, Process, Remainder, Surface
from wattfleet_proto.limits import MAX_MANIFEST_BYTES
from wattfleet_proto.v1 import operator_pb2

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


async def publish(client: Client, artefact: Artefact) -> operator_pb2.PublishReferenceResponse:
    async def parts() -> AsyncIterator[operator_pb2.PublishReferenceRequest]:
        yield operator_pb2.PublishReferenceRequest(manifest=artefact.manifest)
        for offset in range(0, len(artefact.weights), 500_000):
            yield operator_pb2.PublishReferenceRequest(weights_chunk=artefact.weights[offset : offset + 500_000])

    answer: operator_pb2.PublishReferenceResponse = await client.operator.PublishReference(parts())
    return answer


async def refused(client: Client, artefact: Artefact) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await publish(client, artefact)
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
        assert not (await publish(client, with_remainders(artefact, 400, 200))).known


async def test_the_shipped_references_are_accepted(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        for name in reference_models.shipped():
            assert (await publish(client, reference_models.load(name))).digest == reference_models.load(name).digest


async def test_a_check_that_needs_too_much_memory_fails_in_its_own_process(
    config: CoordinatorSettings, another: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "check_in_child", partial(check_in_child, memory_bytes=0))
    async with serving_client(config) as client:
        code, text = await refused(client, another)
        assert code is grpc.StatusCode.DATA_LOSS and "memory" in text
        await client.agent().hello("orin")


async def test_no_more_than_32_references_are_kept_until_one_is_removed(
    config: CoordinatorSettings, artefact: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "check_in_child", lambda artefact: None)  # one process for each would be slow
    async with serving_client(config) as client:
        made = [with_remainders(artefact, 1, 1, f"workload-{k}") for k in range(MAX_REFERENCES)]
        for each in made[:-1]:
            await publish(client, each)
        code, text = await refused(client, made[-1])
        assert code is EXHAUSTED and "32 reference predictors" in text and "reference remove" in text
        assert (await publish(client, made[0])).known
        await client.operator.RemoveReference(operator_pb2.RemoveReferenceRequest(digest=made[0].digest[:12]))
        assert not (await publish(client, made[-1])).known
    async with serving_client(config) as client:
        listed = await client.operator.ListReferences(operator_pb2.ListReferencesRequest())
        digests = {each.digest for each in listed.references}
        assert made[0].digest not in digests and made[-1].digest in digests


async def test_a_reference_in_use_is_not_removed(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact
) -> None:
    async with serving_client(config) as client:
        await publish(client, another)
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
        assert not (await publish(client, another)).known


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
