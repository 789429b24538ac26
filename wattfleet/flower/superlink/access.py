"""Who may use a SuperLink: the coordinator's list, enrolled SuperNodes, and users of its control API."""

from __future__ import annotations

import binascii
import json
import os
import secrets
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn, Protocol

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.common import log
from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_FLWR_AID
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    UnregisterNodeRequest,
    UnregisterNodeResponse,
)
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink.auth_plugin import ControlAuthnPlugin

from wattfleet.common.atomic_files import read_regular_file, replace_file
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.identity_folder import (
    FOR_SUPERLINK,
    SECRET_MODE,
    InvalidProofError,
    make_private_folder,
    proven,
)
from wattfleet.common.identity.peers import USERS_OF_FLWR
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.flower.enrolment_header import HEADER, NOT_ENROLLED

# --- Enrolment list ---------------------------------------------------------------------------------------------------
# Stores the coordinator's last list of enrolled SuperNodes and revoked users, for a start without the coordinator.


FILE = "enrolled.json"
_CONFIRMED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class EnrolmentList:
    """The enrolled SuperNodes, and the revoked certificates of users.

    Attributes:
        supernodes: device id of each public key; keys are lines of OpenSSH.
        revoked: the serial numbers of revoked certificates of Flower apps and operators, hexadecimal.
    """

    supernodes: Mapping[str, str] = field(default_factory=dict)
    revoked: tuple[str, ...] = ()


class StoredList:
    """The file with the last list. Its modification time is when the coordinator last confirmed the list."""

    def __init__(self, folder: Path) -> None:
        """Use a folder. It is made private when the list is stored."""
        self._file = folder / FILE
        self._confirmed_at = datetime.fromtimestamp(0, timezone.utc)

    def read(self) -> tuple[EnrolmentList, datetime] | None:
        """Return the list, and when the coordinator last confirmed it; None if no list is stored.

        Raises:
            InvalidInputError: it is damaged, or cannot be read.
        """
        try:
            content = json.loads(read_regular_file(self._file))
            supernodes = {str(key): str(name) for key, name in content["supernodes"].items()}
            found = EnrolmentList(supernodes, tuple(map(str, content["revoked"])))
            return found, datetime.fromtimestamp(self._file.stat().st_mtime, timezone.utc)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"{self._file} cannot be read: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidInputError(f"{self._file} is damaged: delete it") from None

    def write(self, enrolled: EnrolmentList, now: datetime) -> None:
        """Store a list.

        Raises:
            OSError: it cannot be written; the earlier list is kept.
        """
        make_private_folder(self._file.parent)
        replace_file(self._file, json.dumps(asdict(enrolled)).encode(), mode=SECRET_MODE)
        self._note(now)

    def confirm(self, now: datetime) -> None:
        """Record that the list is still valid; the file is touched at most once a minute.

        Raises:
            OSError: the file cannot be touched.
        """
        if abs(now - self._confirmed_at) >= _CONFIRMED_EVERY:
            self._note(now)

    def _note(self, now: datetime) -> None:
        os.utime(self._file, (now.timestamp(), now.timestamp()))
        self._confirmed_at = now


# --- Node registry ----------------------------------------------------------------------------------------------------
# Registers exactly the SuperNodes with the SuperLink that are enrolled in the fleet.
#
# All changes go through Flower's Control API.

UNREGISTERED = "unregistered"


class Control(Protocol):
    """The part of Flower's Control API that is used here."""

    def ListNodes(self, request: ListNodesRequest) -> ListNodesResponse:  # noqa: N802 - named by Flower
        """List all SuperNodes, unregistered ones included."""
        ...

    def RegisterNode(self, request: RegisterNodeRequest) -> RegisterNodeResponse:  # noqa: N802 - named by Flower
        """Register a SuperNode."""
        ...

    def UnregisterNode(self, request: UnregisterNodeRequest) -> UnregisterNodeResponse:  # noqa: N802 - named by Flower
        """Unregister a SuperNode. Its key can never be registered again."""
        ...


def flower_key(openssh: str) -> bytes:
    """Convert a public key from an OpenSSH line to PEM, the format of Flower's API."""
    return serialization.load_ssh_public_key(openssh.encode()).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


@dataclass
class NodeRegistry:
    """Registers and unregisters SuperNodes.

    Args:
        control: Flower's Control API.
    """

    control: Control
    _refused: set[bytes] = field(default_factory=set)

    def synchronise(self, enrolled: Mapping[bytes, str]) -> int:
        """Register the enrolled SuperNodes that are missing, and unregister all others.

        Args:
            enrolled: device id of each public key; keys in PEM.

        Returns:
            How many SuperNodes could not be registered or unregistered. Each is logged once.

        Raises:
            httpx.HTTPError: the SuperLink does not answer, or refuses to list its SuperNodes.
        """
        nodes = self.control.ListNodes(ListNodesRequest()).nodes_info
        registered = {node.public_key: node for node in nodes if node.status != UNREGISTERED}
        failed = 0
        for key, node in registered.items():
            if key not in enrolled:
                failed += not self._unregister(node.node_id, node.name)
        for key, device_id in enrolled.items():
            if key not in registered:
                failed += not self._register(key, device_id)
        return failed

    def _register(self, key: bytes, device_id: str) -> bool:
        try:
            self.control.RegisterNode(RegisterNodeRequest(public_key=key, name=device_id))
        except httpx.HTTPStatusError as error:
            found = FlowerError.from_json(error.response.text)
            if key not in self._refused:
                self._refused.add(key)
                reason = str(error) if found is None else found.message
                if found is not None and found.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                    reason = "its key was unregistered before, so Flower rejects it. Enrol the device with a new invite"
                log(WARNING, "The SuperNode of %s cannot be registered: %s", device_id, reason)
            return False
        log(INFO, "The SuperNode of %s is registered", device_id)
        return True

    def _unregister(self, node_id: int, name: str) -> bool:
        try:
            self.control.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        except httpx.HTTPStatusError as error:
            found = FlowerError.from_json(error.response.text)
            if found is not None and found.code == ApiErrorCode.NODE_NOT_FOUND:
                return True
            log(WARNING, "The SuperNode of %s cannot be unregistered: %s", name or node_id, error)
            return False
        log(INFO, "The SuperNode of %s is unregistered, because it is no longer enrolled", name or node_id)
        return True


# --- Control access ---------------------------------------------------------------------------------------------------
# Access control of the SuperLink: proofs of identity for Flower's Control API, local processes for its Runtime API.
#
# On its own, Flower lets anybody who reaches the port start runs and register SuperNodes. Its Runtime API is on the
# same port. It is meant for the processes that the SuperLink starts, but hands out tasks to any caller. Its Fleet API
# refuses a SuperNode in the same way whether it was revoked, or the SuperLink was just restarted.

CONNECT = "wattfleet flower connect"
_RUNTIME = "/v1/runtime/"
_FLEET = "/v1/fleet/"
_FIRST_ERROR = 400
_FORWARDED = (b"forwarded", b"x-forwarded-for")


class ControlAccess(ControlAuthnPlugin):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Lets Flower apps and operators of a fleet use the Control API.

    Attributes:
        own_token: the token with which the SuperLink's own process uses the API.
    """

    def __init__(self, fleet: str, trusted: Path, now: Callable[[], datetime] = utc_now) -> None:
        """Guard a SuperLink.

        Args:
            fleet: the fleet that certificates must name.
            trusted: the file with the authorities to trust, which is read for each request.
            now: returns the current time.
        """
        self.own_token = secrets.token_urlsafe(32)
        self._fleet = fleet
        self._trusted = trusted
        self._now = now
        self._revoked: frozenset[str] = frozenset()

    def revoke(self, serials: Collection[str]) -> None:
        """Set the certificates to refuse, by serial number. They replace those set before."""
        self._revoked = frozenset(serials)

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Check the token of a request. All users share one Flower account, which owns the runs and SuperNodes.

        Raises:
            FlowerError: the request is refused; `flwr` shows the text.
        """
        token = next((str(value) for key, value in metadata if key == ACCESS_TOKEN_KEY), "")
        if not token:
            _refuse("this SuperLink needs a proof of identity")
        if secrets.compare_digest(token.encode(), self.own_token.encode()):
            return True, AccountInfo(NOOP_FLWR_AID, "wattfleet-superlink")
        try:
            certificate = proven(token, FOR_SUPERLINK, self._trusted.read_bytes(), self._now())
            peer = certificate.peer
        except InvalidProofError as error:
            _refuse(str(error))
        except (OSError, WattfleetError) as error:
            _refuse(f"the certificate cannot be checked: {error}")
        if peer.fleet != self._fleet:
            _refuse(f"the certificate belongs to the fleet {peer.fleet!r}, but this SuperLink to {self._fleet!r}")
        if peer.role not in USERS_OF_FLWR:
            _refuse(f"a certificate with the role {peer.role.value} may not use Flower's Control API")
        if certificate.serial in self._revoked:
            _refuse(f"the certificate of {peer} was revoked")
        return True, AccountInfo(NOOP_FLWR_AID, str(peer))

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        """Refuse `flwr login`, since users connect with `wattfleet flower connect` instead.

        Raises:
            FlowerError: always; its text gives the remedy.
        """
        _refuse("this SuperLink has no `flwr login`")

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        """Refuse, like `get_login_details`.

        Raises:
            FlowerError: always.
        """
        return _refuse("this SuperLink has no `flwr login`")

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        """Refuse, since a proof of identity cannot be refreshed; the user makes a new one.

        Raises:
            FlowerError: always; its text gives the remedy.
        """
        return _refuse("the proof of identity is no longer valid")


def _refuse(reason: str) -> NoReturn:
    details = f"{reason}: run `{CONNECT}` with an identity of a Flower app or an operator of this fleet"
    raise FlowerError(ApiErrorCode.NO_PERMISSIONS, reason, public_details=details)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LocalRuntime:
    """An ASGI app that answers Runtime API requests only from processes on this machine."""

    def __init__(self, app: App) -> None:
        """Wrap Flower's app."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or not scope["path"].startswith(_RUNTIME) or _is_local(scope):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"the Runtime API is for processes of this machine\n"})


class ExplainedRefusals:
    """An ASGI app that adds a header to each refusal of a SuperNode whose key is not enrolled."""

    def __init__(self, app: App, is_not_enrolled: Callable[[bytes], bool]) -> None:
        """Wrap Flower's app.

        Args:
            app: Flower's app.
            is_not_enrolled: returns whether a public key, in PEM, is certainly not enrolled.
        """
        self._app = app
        self._is_not_enrolled = is_not_enrolled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def explain(message: MutableMapping[str, Any]) -> None:
            is_refused = message["type"] == "http.response.start" and message["status"] >= _FIRST_ERROR
            if is_refused and self._is_not_enrolled(_public_key(scope)):
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), NOT_ENROLLED.encode())]
            await send(message)

        is_fleet = scope["type"] == "http" and scope["path"].startswith(_FLEET)
        await self._app(scope, receive, explain if is_fleet else send)


def _public_key(scope: Scope) -> bytes:
    """The public key of the SuperNode that sends a request; empty if it has none."""
    name = FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()
    try:
        return b64decode(next((value for key, value in scope["headers"] if key == name), b""), validate=True)
    except binascii.Error:
        return b""


def _is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine: from loopback, or from the address that it was sent to.

    A proxy on this machine connects from there, too. Its requests have a header with the address of the real client.
    """
    client, server = scope.get("client"), scope.get("server")
    if not client or any(name in _FORWARDED for name, _ in scope["headers"]):
        return False
    host = str(client[0])
    return host in ("127.0.0.1", "::1", "::ffff:127.0.0.1") or (server is not None and host == server[0])
