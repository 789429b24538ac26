"""The SuperLink: who may use it, which SuperNodes are registered, and TLS files that are replaced."""

from __future__ import annotations

import json
import logging
import ssl
from base64 import b64encode
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
from flwr.proto.control_pb2 import ListNodesResponse, RegisterNodeResponse, UnregisterNodeResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.error import ApiErrorCode, FlowerError

from tests.fakes.served import CertifiedFleet
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.certificates import new_key, request_certificate
from wattfleet.common.identity.identity_folder import FOR_SUPERLINK, proof_of
from wattfleet.common.identity.peers import Role
from wattfleet.common.identity.supernode_folder import SuperNodeKey
from wattfleet.flower.enrolment_header import HEADER, NOT_ENROLLED
from wattfleet.flower.superlink.access import ControlAccess, ExplainedRefusals, LocalRuntime, NodeRegistry, flower_key
from wattfleet.flower.superlink.command import serving_config
from wattfleet.flower.superlink.server_certificate import load_pair

# --- Access to the SuperLink ------------------------------------------------------------------------------------------
# Who may use the SuperLink's Control and Runtime APIs.


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


# --- Node registry ----------------------------------------------------------------------------------------------------
# A SuperLink's registered SuperNodes follow the enrolled ones.


class FlowersNodes:
    """SuperNodes as Flower's SuperLink keeps them: an unregistered key cannot be used again."""

    def __init__(self) -> None:
        self.nodes: list[NodeInfo] = []
        self.calls = 0

    def ListNodes(self, request: Any) -> ListNodesResponse:  # noqa: N802 - named by Flower
        return ListNodesResponse(nodes_info=self.nodes)

    def RegisterNode(self, request: Any) -> RegisterNodeResponse:  # noqa: N802 - named by Flower
        self.calls += 1
        if any(node.public_key == request.public_key for node in self.nodes):
            raise refused(ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE)
        number = len(self.nodes) + 1
        self.nodes.append(
            NodeInfo(node_id=number, status="registered", public_key=request.public_key, name=request.name)
        )
        return RegisterNodeResponse(node_id=number)

    def UnregisterNode(self, request: Any) -> UnregisterNodeResponse:  # noqa: N802 - named by Flower
        self.calls += 1
        found = [node for node in self.nodes if node.node_id == request.node_id and node.status != "unregistered"]
        if not found:
            raise refused(ApiErrorCode.NODE_NOT_FOUND)
        found[0].status = "unregistered"
        return UnregisterNodeResponse()

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes if node.status != "unregistered"]


def refused(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://localhost")
    body = FlowerError(code, "internal").to_json("refused")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(409, text=json.dumps(body)))


def test_missing_ones_are_registered_and_others_unregistered() -> None:
    flowers = FlowersNodes()
    registry = NodeRegistry(flowers)
    assert registry.synchronise({b"a": "orin-1", b"b": "orin-2"}) == 0
    assert flowers.names == ["orin-1", "orin-2"]
    assert registry.synchronise({b"b": "orin-2", b"c": "orin-3"}) == 0
    assert flowers.names == ["orin-2", "orin-3"]
    before = flowers.calls
    registry.synchronise({b"b": "orin-2", b"c": "orin-3"})
    assert flowers.calls == before


def test_a_key_that_was_unregistered_needs_a_new_enrolment(caplog: pytest.LogCaptureFixture) -> None:
    flowers = FlowersNodes()
    registry = NodeRegistry(flowers)
    registry.synchronise({b"a": "orin-1"})
    registry.synchronise({})
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, "flwr"):
        assert registry.synchronise({b"a": "orin-1", b"b": "orin-2"}) == 1
        assert registry.synchronise({b"a": "orin-1", b"b": "orin-2"}) == 1
    assert flowers.names == ["orin-2"]
    assert [record.getMessage() for record in caplog.records if "Enrol the device" in record.getMessage()] != []
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_a_key_of_openssh_is_what_flowers_own_command_sends(tmp_path: Any) -> None:
    from flwr.cli.supernode.register import try_load_public_key

    key = SuperNodeKey.create()
    file = tmp_path / "node.pub"
    file.write_bytes(key.public)
    assert flower_key(key.public.decode()) == try_load_public_key(file)


# --- TLS files --------------------------------------------------------------------------------------------------------
# TLS files of a server that are replaced while it runs.


def shown(server: ssl.SSLContext, trusted_pem: bytes) -> bytes | None:
    """The certificate that a server's context presents to a client."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=trusted_pem.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends[0].getpeercert(binary_form=True)


def test_a_pair_that_does_not_match_leaves_the_one_of_before_in_use(tmp_path: Path) -> None:
    fleet = CertifiedFleet.create(tmp_path / "authority")
    pem, key = tmp_path / "server.pem", tmp_path / "server.key"

    def write(key_pem: bytes, of_pem: bytes) -> None:
        key.write_bytes(key_pem)
        request, day = request_certificate(of_pem), timedelta(days=1)
        pem.write_bytes(fleet.authority.authority.issue_superlink(request, ["localhost"], day, utc_now()))

    first, second = new_key(), new_key()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    write(first, first)
    load_pair(context, pem, key)
    before = shown(context, fleet.authority.trusted_pem)
    assert before == ssl.PEM_cert_to_DER_cert(pem.read_text())
    write(first, second)  # the key is not replaced yet
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        load_pair(context, pem, key)
    assert shown(context, fleet.authority.trusted_pem) == before
    write(second, second)
    load_pair(context, pem, key)
    assert shown(context, fleet.authority.trusted_pem) == ssl.PEM_cert_to_DER_cert(pem.read_text())
