"""Who may use the SuperLink's Control and Runtime APIs."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.error import FlowerError

from tests.fakes.certified import CertifiedFleet
from wattfleet_flower.enrolment_header import HEADER, NOT_ENROLLED
from wattfleet_flower.superlink.access import ControlAccess, ExplainedRefusals, LocalRuntime
from wattfleet_flower.superlink.command import serving_config
from wattfleet_identity.identity_folder import FOR_SUPERLINK, proof_of
from wattfleet_identity.peers import Role
from wattfleet_io.clock import utc_now

_TASKS = "/v1/runtime/acquire-task"


@pytest.fixture
def access(fleet: CertifiedFleet) -> ControlAccess:
    return ControlAccess(fleet.authority.authority.fleet, fleet.authority.folder / "trusted.pem")


def account(access: ControlAccess, token: str) -> tuple[bool, Any]:
    return access.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, token)])


@pytest.mark.parametrize("role", [Role.FLOWER, Role.SUPERLINK, Role.OPERATOR])
def test_apps_and_operators_share_flowers_account(role: Role, fleet: CertifiedFleet, access: ControlAccess) -> None:
    is_valid, info = account(access, proof_of(fleet.identity(role), FOR_SUPERLINK, utc_now()))
    assert is_valid and info.flwr_aid == NOOP_FLWR_AID
    assert account(access, access.own_token)[0]


@pytest.mark.parametrize("role", [Role.DEVICE, Role.VIEWER])
def test_other_roles_are_refused(role: Role, fleet: CertifiedFleet, access: ControlAccess) -> None:
    with pytest.raises(FlowerError) as refused:
        account(access, proof_of(fleet.identity(role), FOR_SUPERLINK, utc_now()))
    assert f"role {role.value} may not use" in str(refused.value.public_details)


def test_nobody_is_let_in_without_a_proof(access: ControlAccess, tmp_path: Path) -> None:
    stranger = CertifiedFleet.create(tmp_path / "other").identity(Role.OPERATOR)
    for token in ("", "guessed", proof_of(stranger, FOR_SUPERLINK, utc_now())):
        with pytest.raises(FlowerError) as refused:
            account(access, token)
        assert "run `wattfleet flower connect`" in str(refused.value.public_details)


def test_a_revoked_certificate_is_refused(fleet: CertifiedFleet, access: ControlAccess) -> None:
    own = fleet.identity(Role.FLOWER, "app")
    proof = proof_of(own, FOR_SUPERLINK, utc_now())
    assert account(access, proof)[0]
    access.revoke([own.certificate.serial])
    with pytest.raises(FlowerError) as refused:
        account(access, proof)
    assert "flower app was revoked" in str(refused.value.public_details)


def test_flwr_login_names_the_way_in(access: ControlAccess) -> None:
    with pytest.raises(FlowerError) as refused:
        access.get_login_details()
    assert "wattfleet flower connect" in str(refused.value.public_details)


async def status_of(app: Any, client: str | None, path: str, *headers: tuple[bytes, bytes]) -> int:
    """The status code of an ASGI app's response to a request to 10.0.0.5."""
    return int((await start_of(app, client, path, *headers))["status"])


async def start_of(app: Any, client: str | None, path: str, *headers: tuple[bytes, bytes]) -> MutableMapping[str, Any]:
    """The beginning of an ASGI app's response to a request to 10.0.0.5."""
    starts: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read")

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            starts.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "scheme": "https",
        "path": path,
        "headers": list(headers),
        "client": client and (client, 4711),
        "server": ("10.0.0.5", 8000),
    }
    await app(scope, receive, send)
    (start,) = starts
    return start


async def flowers_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


@pytest.mark.parametrize(
    ("client", "path", "is_served"),
    [
        ("127.0.0.1", _TASKS, True),
        ("::1", _TASKS, True),
        ("10.0.0.5", _TASKS, True),  # the machine's own address
        ("10.0.0.9", _TASKS, False),
        (None, _TASKS, False),
        ("10.0.0.9", "/v1/fleet/pull-messages", True),
    ],
)
async def test_tasks_are_for_processes_of_the_machine(client: str | None, path: str, is_served: bool) -> None:
    assert await status_of(LocalRuntime(flowers_app), client, path) == (200 if is_served else 403)


@pytest.mark.parametrize("header", [b"x-forwarded-for", b"forwarded"])
async def test_what_a_proxy_of_the_machine_passes_on_is_not_of_the_machine(header: bytes) -> None:
    assert await status_of(LocalRuntime(flowers_app), "127.0.0.1", _TASKS, (header, b"127.0.0.1")) == 403


async def test_nobody_names_an_address_of_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    config = serving_config(flowers_app, log_config=None, ws="none")
    config.load()
    assert await status_of(config.loaded_app, "10.0.0.9", _TASKS, (b"x-forwarded-for", b"127.0.0.1")) == 403
    assert await status_of(config.loaded_app, "127.0.0.1", _TASKS) == 200


async def refusing_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})


@pytest.mark.parametrize(
    ("app", "path", "key", "is_told"),
    [
        (refusing_app, "/v1/fleet/pull-messages", b"revoked", True),
        (refusing_app, "/v1/fleet/pull-messages", b"enrolled", False),
        (flowers_app, "/v1/fleet/pull-messages", b"revoked", False),
        (refusing_app, "/v1/control/list-nodes", b"revoked", False),
    ],
)
async def test_a_refused_supernode_learns_that_it_is_not_enrolled(
    app: Any, path: str, key: bytes, is_told: bool
) -> None:
    header = (FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b64encode(key))
    start = await start_of(ExplainedRefusals(app, lambda key: key != b"enrolled"), "10.0.0.9", path, header)
    assert ((HEADER.encode(), NOT_ENROLLED.encode()) in start.get("headers", [])) == is_told
