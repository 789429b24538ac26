"""A coordinator with TLS starts child processes without fork, which could copy locks that gRPC's threads hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, calling, certified
from tests.fakes.served import serving
from wattfleet.prediction import Artefact
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc, operator_pb2


async def test_no_request_makes_a_coordinator_fork(
    config: CoordinatorSettings, tmp_path: Path, another: Artefact, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks: list[str] = []
    children: list[dict[str, Any]] = []
    start = subprocess.Popen.__init__

    def starting(self: Any, *arguments: Any, **options: Any) -> None:
        children.append(options)
        start(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", starting)
    for name in ("fork", "forkpty"):
        monkeypatch.setattr(os, name, lambda name=name: forks.append(name) or 1)
    fleet = CertifiedFleet.create(tmp_path / "authority")
    anna = fleet.identity(Role.OPERATOR, "anna")
    async with serving(certified(config, fleet.authority.folder)) as served, calling(served, anna) as client:
        parts = [
            operator_pb2.PublishReferenceRequest(manifest=another.manifest),
            operator_pb2.PublishReferenceRequest(weights_chunk=another.weights),
        ]
        await client.operator.PublishReference(iter(parts))
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        await service.BeginRotation(identity_pb2.BeginRotationRequest())
    assert forks == []
    assert children, "a published reference is checked in a child"
    # Without these, Python starts a child by vfork and exec, and runs no code in between.
    assert not any(options.get(name) for options in children for name in ("preexec_fn", "user", "group"))
