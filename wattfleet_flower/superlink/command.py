"""The command `wattfleet-superlink`: Flower's SuperLink with TLS, which accepts whoever is enrolled in the fleet."""

from __future__ import annotations

import argparse
import importlib
import os
import ssl
import sys
import threading
from collections.abc import Sequence
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from flwr.common import log
from flwr.supercore.constant import SUPERLINK_UVICORN_DEFAULT_PORT, UVICORN_DEFAULT_HOST
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_flower import process_log
from wattfleet_flower.flower_version import unknown_version
from wattfleet_flower.logged_program import start_logged
from wattfleet_flower.superlink.control_access import ControlAccess, LocalRuntime
from wattfleet_flower.superlink.enrolment_list import StoredList
from wattfleet_flower.superlink.keeper import Keeper
from wattfleet_flower.superlink.node_registry import NodeRegistry
from wattfleet_flower.superlink.server_certificate import FOLDER, ServerCertificate
from wattfleet_flower.superlink.tls_files import WatchedFiles, load_pair
from wattfleet_identity.endpoint import USER_FOLDER, Endpoint, named_folder, require_identity
from wattfleet_identity.identity_folder import TRUSTED
from wattfleet_identity.peers import Role
from wattfleet_io.cli import exit_code, print_error
from wattfleet_io.connection_variables import IDENTITY_VARIABLE
from wattfleet_io.logs import log_format

# The package exports a function of the module's name.
_flower: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
_EVERY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_STARTUP_FAILED = 3  # as of uvicorn's own `run`


def main() -> None:
    """Run the SuperLink."""
    parser = own_options_parser()
    options, flowers = parser.parse_known_args()
    sys.argv[1:] = flowers
    try:
        if {"-h", "--help"} & set(flowers):
            parser.print_help()
            print("\nThe other options are Flower's own:\n", flush=True)
        else:
            process_log.start(options)
            _log_as_chosen()
            _secure(options, flowers)
    except WattfleetError as error:
        print_error(f"wattfleet-superlink: {error}")
        sys.exit(exit_code(error))
    _flower.flower_superlink()


def own_options_parser() -> argparse.ArgumentParser:
    """The options that Flower does not have; the others are passed on to it."""
    parser = argparse.ArgumentParser(
        prog="wattfleet-superlink",
        usage="%(prog)s [--identity FOLDER] [--coordinator HOST:PORT] [--check-s S] [--log-format FORMAT]"
        " [--log-level LEVEL] [options of flower-superlink]",
        description="Start a Flower SuperLink with TLS of the fleet's authority, which accepts the SuperNodes and users"
        " that are enrolled. Without an identity, it is flower-superlink.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--identity",
        type=Path,
        metavar="FOLDER",
        help=f"take the identity from this folder (default: {IDENTITY_VARIABLE}, or {USER_FOLDER})",
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="ask this coordinator (default: the one of the identity)"
    )
    parser.add_argument(
        "--check-s",
        type=_check_s,
        default=2.0,
        metavar="S",
        help="set how often the coordinator is asked who is enrolled, in seconds (default: %(default)g)",
    )
    process_log.add_options(parser)
    return parser


def _log_as_chosen() -> None:
    """In JSON, uvicorn's lines and those of the processes that Flower's SuperLink starts are JSON, too."""
    if log_format() != "json":
        return
    start_logged(_flower)
    flowers = getattr(_flower, "get_uvicorn_log_config", None)
    if flowers is not None:
        _flower.get_uvicorn_log_config = lambda level: process_log.without_handlers(flowers(level))


def _check_s(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 s")
    return value


def _of_flower(options: Sequence[str]) -> argparse.Namespace:
    """The options of Flower that matter here; Flower parses and checks all of them itself."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=UVICORN_DEFAULT_HOST)
    parser.add_argument("--port", default=str(SUPERLINK_UVICORN_DEFAULT_PORT))
    for name in ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"):
        parser.add_argument(name)
    for name in ("--insecure", "--enable-supernode-auth"):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(options)[0]


def _secure(options: argparse.Namespace, flowers: Sequence[str]) -> None:
    """Set what Flower's SuperLink uses for TLS and access, if there is an identity.

    Raises:
        WattfleetError: the identity cannot be used, or there is no certificate for TLS.
    """
    given = _of_flower(flowers)
    if given.insecure:
        if options.identity is not None:
            raise InvalidInputError("--insecure switches TLS off, and --identity is for TLS: leave out one of them")
        return
    folder = named_folder(options.identity, USER_FOLDER)
    if folder is None:
        return
    folder = folder.absolute()
    if versions := unknown_version():
        raise InvalidInputError(f"with an identity it needs {versions}")
    peer = require_identity(folder).peer
    if peer.role is not Role.SUPERLINK:
        raise InvalidInputError(
            f"the identity in {folder} is of {peer}, and a SuperLink needs one of the role superlink: make an invite"
            " with `wattfleet coordinator invite --role superlink --name superlink`, and enrol with `wattfleet join`"
        )
    endpoint = Endpoint.of(options.coordinator, folder)
    certificate, files = None, [given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certfile]
    if not any(files):
        certificate = ServerCertificate(endpoint, [] if _is_loopback_or_every(given.host) else [given.host])
        if problem := certificate.prepare():
            log(WARNING, "wattfleet-superlink: %s. The TLS certificate of before is used", problem)
        files = [str(each) for each in (certificate.certificate_file, certificate.key_file, certificate.trusted_file)]
        for name, file in zip(("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"), files, strict=True):
            sys.argv += [name, file]
    if not given.enable_supernode_auth:
        sys.argv.append("--enable-supernode-auth")
    os.environ[IDENTITY_VARIABLE] = str(folder)  # for the ServerApps that it starts
    # Those beside the TLS certificate follow a replacement of the authority within seconds.
    access = ControlAccess(peer.fleet, folder / TRUSTED if certificate is None else certificate.trusted_file)
    _flower.load_control_authn_plugin = lambda: access
    _flower.uvicorn = SimpleNamespace(run=_Serving(endpoint, certificate, access, given, files, options.check_s))


def _is_loopback_or_every(host: str) -> bool:
    return host in _EVERY_HOST or host in ("127.0.0.1", "::1", "localhost")


def serving_config(app: Any, **settings: Any) -> uvicorn.Config:
    """How Flower's app is served, with uvicorn's settings; its Runtime API is for this machine."""
    # Otherwise FORWARDED_ALLOW_IPS could let a caller choose the address that it seems to come from.
    return uvicorn.Config(app=LocalRuntime(app), proxy_headers=False, **settings)


class _Serving:
    """Stands in for `uvicorn.run`: serves Flower's app, and keeps it up to date meanwhile."""

    def __init__(
        self,
        endpoint: Endpoint,
        certificate: ServerCertificate | None,
        access: ControlAccess,
        given: argparse.Namespace,
        files: Sequence[str],
        every_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._access = access
        host = _EVERY_HOST.get(given.host, given.host)
        self._address = f"{f'[{host}]' if ':' in host else host}:{given.port}"
        self._certificate = certificate
        self._files = files
        self._every_s = every_s

    def __call__(self, app: Any, **settings: Any) -> None:
        """Serve until stopped."""
        # Flower has made sure that there are three files.
        certificate_file, key_file, trusted_file = paths = [Path(file).expanduser() for file in self._files]
        certificate = self._certificate or WatchedFiles(*paths)
        config = serving_config(app, **settings)
        config.load()
        context, registry = config.ssl, NodeRegistry(self._control(trusted_file))
        assert context is not None, "Flower was given TLS files"

        def reload_tls() -> None:
            control = self._control(trusted_file)
            load_pair(context, certificate_file, key_file)
            registry.control = control

        assert self._endpoint.folder is not None, "it has an identity"
        stored = StoredList(self._endpoint.folder / FOLDER)
        keeper = Keeper(self._endpoint, certificate, self._access, registry, stored, reload_tls, self._every_s)
        keeper.restore()
        server = uvicorn.Server(config)
        threading.Thread(target=keeper.run, name="wattfleet-superlink keeper", daemon=True).start()
        server.run()
        if not server.started:
            sys.exit(_STARTUP_FAILED)

    def _control(self, trusted_file: Path) -> ControlHttpClient:
        """A client of this SuperLink's own Control API."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(trusted_file)
        interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI"), _Bearer(self._access.own_token)]
        return ControlHttpClient(f"https://{self._address}", interceptors=interceptors, verify=context)


class _Bearer:
    """Adds a token to Flower's requests."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send one request."""
        context.request.headers["Authorization"] = f"Bearer {self._token}"
        response: httpx.Response = call_next(context)
        return response
