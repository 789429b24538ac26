"""Who may use the SuperLink's Control and Runtime API."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
from flwr.supercore.error import FlowerError

from tests.fakes.certified import CertifiedFleet
from wattfleet_flower.superlink.control_access import ControlAccess, LocalRuntime
from wattfleet_identity.peers import Role
from wattfleet_identity.proofs import FOR_SUPERLINK, proof_of


@pytest.fixture
def fleet(tmp_path: Path) -> CertifiedFleet:
    return CertifiedFleet.create(tmp_path / "authority")


@pytest.fixture
def access(fleet: CertifiedFleet) -> ControlAccess:
    return ControlAccess(fleet.authority.authority.fleet, fleet.authority.folder / "trusted.pem")


def account(access: ControlAccess, token: str) -> tuple[bool, Any]:
    return access.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, token)])


@pytest.mark.parametrize("role", [Role.FLOWER, Role.OPERATOR])
def test_apps_and_operators_share_flowers_account(role: Role, fleet: CertifiedFleet, access: ControlAccess) -> None:
    is_valid, info = account(access, proof_of(fleet.identity(role), FOR_SUPERLINK))
    assert is_valid and info.flwr_aid == NOOP_FLWR_AID
    assert account(access, access.own_token)[0]


@pytest.mark.parametrize("role", [Role.DEVICE, Role.VIEWER])
def test_other_roles_are_refused(role: Role, fleet: CertifiedFleet, access: ControlAccess) -> None:
    with pytest.raises(FlowerError) as refused:
        account(access, proof_of(fleet.identity(role), FOR_SUPERLINK))
    assert f"role {role.value} may not use" in str(refused.value.public_details)


def test_nobody_is_let_in_without_a_proof(access: ControlAccess, tmp_path: Path) -> None:
    stranger = CertifiedFleet.create(tmp_path / "other").identity(Role.OPERATOR)
    for token in ("", "guessed", proof_of(stranger, FOR_SUPERLINK)):
        with pytest.raises(FlowerError) as refused:
            account(access, token)
        assert "run `wattfleet flower connect`" in str(refused.value.public_details)


def test_a_revoked_certificate_is_refused(fleet: CertifiedFleet, access: ControlAccess) -> None:
    own = fleet.identity(Role.FLOWER, "app")
    proof = proof_of(own, FOR_SUPERLINK)
    assert account(access, proof)[0]
    access.revoke([own.certificate.serial])
    with pytest.raises(FlowerError) as refused:
        account(access, proof)
    assert "flower app was revoked" in str(refused.value.public_details)


def test_flwr_login_names_the_way_in(access: ControlAccess) -> None:
    with pytest.raises(FlowerError) as refused:
        access.get_login_details()
    assert "wattfleet flower connect" in str(refused.value.public_details)


@pytest.mark.parametrize(
    ("client", "path", "is_served"),
    [
        ("127.0.0.1", "/v1/runtime/acquire-task", True),
        ("::1", "/v1/runtime/acquire-task", True),
        ("10.0.0.5", "/v1/runtime/acquire-task", True),  # the address of the machine itself
        ("10.0.0.9", "/v1/runtime/acquire-task", False),
        (None, "/v1/runtime/acquire-task", False),
        ("10.0.0.9", "/v1/fleet/pull-messages", True),
    ],
)
async def test_tasks_are_for_processes_of_the_machine(client: str | None, path: str, is_served: bool) -> None:
    statuses: list[int] = []

    async def flowers_app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read")

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "path": path, "client": client and (client, 4711), "server": ("10.0.0.5", 8000)}
    await LocalRuntime(flowers_app)(scope, receive, send)
    assert statuses == [200 if is_served else 403]
