"""`wattfleet coordinator revoke`: whose certificates it revokes, and the questions that it asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import CertifiedFleet, calling, certified, joined
from tests.fakes.served import serving
from tests.fakes.shell import command
from wattfleet.errors import WattfleetError
from wattfleet_identity.identity_folder import write_identity
from wattfleet_identity.joining import Applicant
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import identity_pb2_grpc


@pytest.fixture
async def shell(config: CoordinatorSettings, tmp_path: Path) -> AsyncIterator[Callable[..., str]]:
    """Runs commands as an operator of a fleet that has a device and a viewer of the same name."""
    fleet = CertifiedFleet.create(tmp_path / "authority")
    write_identity(tmp_path / "operator", fleet.identity(Role.OPERATOR))
    settings = certified(config, fleet.authority.folder)
    async with serving(settings) as served, calling(served, fleet.identity(Role.OPERATOR)) as operator:
        service = identity_pb2_grpc.IdentityServiceStub(operator.channel)
        await joined(service, Role.DEVICE, Applicant("roof", "orin-nano", "6f0c"), "roof")
        await joined(service, Role.VIEWER, Applicant(), "roof")
        options = ("--coordinator", served.bound.address, "--identity", str(tmp_path / "operator"))
        yield lambda *words, **typed: command(*words, *options, **typed).output


def roles_left(shell: Callable[..., str]) -> list[str]:
    return [each["role"] for each in json.loads(shell("certificates", "--json")) if each["revoked"] is None]


async def test_a_role_is_revoked_alone(shell: Callable[..., str]) -> None:
    await asyncio.to_thread(shell, "revoke", "roof", "--role", "viewer")
    assert await asyncio.to_thread(roles_left, shell) == ["device"]
    with pytest.raises(WattfleetError, match="no valid certificate has the name or serial number 'viewer roof'"):
        await asyncio.to_thread(shell, "revoke", "roof", "--role", "viewer")


async def test_without_a_terminal_every_role_is_revoked(shell: Callable[..., str]) -> None:
    out = await asyncio.to_thread(shell, "revoke", "roof")
    assert "of device roof is revoked" in out and "of viewer roof is revoked" in out


@pytest.mark.parametrize(("answer", "left"), [("n\n", ["device", "viewer"]), ("y\n", []), ("\n", [])])
async def test_on_a_terminal_it_asks_before_it_revokes_several_roles(
    shell: Callable[..., str], answer: str, left: list[str]
) -> None:
    out = await asyncio.to_thread(shell, "revoke", "roof", typed=answer)
    assert "roof has certificates of several roles: device, viewer" in out
    assert ("nothing was revoked: repeat the command with --role device or --role viewer" in out) == bool(left)
    assert await asyncio.to_thread(roles_left, shell) == left
