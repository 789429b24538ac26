"""Enrolment over real TLS: from an invite to a certificate, its revocation, and the audit log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, calling, certified, invited
from tests.fakes.served import serving
from wattfleet_identity.joining import Applicant, EnrolmentRefusedError, join
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc, view_pb2


async def test_a_device_enrols_once_and_is_revoked(
    config: CoordinatorSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    anna = fleet.identity(Role.OPERATOR, "anna")
    async with serving(certified(config, fleet.authority.folder)) as served, calling(served, anna) as client:
        service = identity_pb2_grpc.IdentityServiceStub(client.channel)
        invite = await invited(service, Role.DEVICE)
        found = await asyncio.to_thread(join, invite, Applicant("orin-3", "agx-orin", "6f0c"))
        assert (found.peer.name, found.peer.role, found.coordinator) == ("orin-3", Role.DEVICE, served.bound.address)
        with pytest.raises(EnrolmentRefusedError, match="unknown, has expired, or was used up"):
            await asyncio.to_thread(join, invite, Applicant("orin-4"))
        revoked = await service.RevokeCertificates(identity_pb2.RevokeCertificatesRequest(name_or_serial="orin-3"))
        assert [each.serial for each in revoked.certificates] == [found.certificate.serial]
        async with calling(served, found) as device:
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked"):
                await device.view.GetFleet(view_pb2.GetFleetRequest())
        entries = [
            entry
            async for answer in service.ReadAuditLog(identity_pb2.ReadAuditLogRequest())
            for entry in answer.entries
        ]
        assert [(each.caller, each.method) for each in entries] == [
            ("operator anna", "Invite"),
            ("operator anna", "RevokeCertificates"),
        ]
        assert invite.token not in repr(entries) and invite.token not in caplog.text
