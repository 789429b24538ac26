"""The command `wattfleet-superlink`: Flower's SuperLink with TLS, open to the enrolled SuperNodes and users."""

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

from wattfleet.common.addresses import IDENTITY_VARIABLE
from wattfleet.common.cli import exit_code, print_error
from wattfleet.common.identity.channels import Endpoint, named_folder, require_identity
from wattfleet.common.identity.identity_folder import TRUSTED
from wattfleet.common.identity.peers import Role
from wattfleet.common.logs import log_format
from wattfleet.common.settings.user_file import in_home, user_folder
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.flower import process_log
from wattfleet.flower.flower_version import unsupported_version
from wattfleet.flower.logged_program import start_logged
from wattfleet.flower.superlink.access import ControlAccess, ExplainedRefusals, LocalRuntime, NodeRegistry, StoredList
from wattfleet.flower.superlink.keeper import Keeper
from wattfleet.flower.superlink.server_certificate import FOLDER, ServerCertificate, WatchedFiles, load_pair

# The package exports a function of the module's name.
_flower: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
_EVERY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_STARTUP_FAILED = 3  # the exit status of `uvicorn.run`


def main() -> None:
    """Run the SuperLink."""
    parser = own_options_parser()
    options, flower_options = parser.parse_known_args()
    sys.argv[1:] = flower_options
    try:
        if {"-h", "--help"} & set(flower_options):
            parser.print_help()
            print("\nThe other options are Flower's own:\n", flush=True)
        else:
            process_log.start(options)
            _log_as_chosen()
            _secure(options, flower_options)
    except WattfleetError as error:
        print_error(f"wattfleet-superlink: {error}")
        sys.exit(exit_code(error))
    _flower.flower_superlink()


def own_options_parser() -> argparse.ArgumentParser:
    """Return a parser of Wattfleet's own options; all other options are passed on to Flower."""
    parser = argparse.ArgumentParser(
        prog="wattfleet-superlink",
        usage="%(prog)s [--identity FOLDER] [--coordinator HOST:PORT] [--check-s S] [--log-format FORMAT]"
        " [--log-level LEVEL] [options of flower-superlink]",
        description="Start a Flower SuperLink with a TLS certificate from the fleet's authority. It accepts the"
        " SuperNodes and users that are enrolled in the fleet. Without an identity, it behaves like"
        " flower-superlink.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--identity",
        type=Path,
        metavar="FOLDER",
        help=f"use the identity in this folder (default: {IDENTITY_VARIABLE}, or {in_home(user_folder())})",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="use this coordinator (default: the one at which the identity was enrolled)",
    )
    parser.add_argument(
        "--check-s",
        type=_check_s,
        default=2.0,
        metavar="S",
        help="set the seconds between two requests to the coordinator for the enrolled SuperNodes and users"
        " (default: %(default)g)",
    )
    process_log.add_options(parser)
    return parser


def _log_as_chosen() -> None:
    """If the log is JSON, log uvicorn's lines and those of the processes that the SuperLink starts as JSON, too."""
    if log_format() != "json":
        return
    start_logged(_flower)
    default_config = getattr(_flower, "get_uvicorn_log_config", None)
    if default_config is not None:
        _flower.get_uvicorn_log_config = lambda level: process_log.without_handlers(default_config(level))


def _check_s(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 s")
    return value


def _of_flower(options: Sequence[str]) -> argparse.Namespace:
    """Parse the Flower options that matter here. Flower parses and checks all of its options itself."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=UVICORN_DEFAULT_HOST)
    parser.add_argument("--port", default=str(SUPERLINK_UVICORN_DEFAULT_PORT))
    for name in ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"):
        parser.add_argument(name)
    for name in ("--insecure", "--enable-supernode-auth"):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(options)[0]


def _secure(options: argparse.Namespace, flower_options: Sequence[str]) -> None:
    """Set up TLS and access control in Flower's SuperLink, if there is an identity."""
    given = _of_flower(flower_options)
    if given.insecure:
        if options.identity is not None:
            raise InvalidInputError("--insecure switches TLS off, but --identity needs TLS: leave out one of them")
        return
    folder = named_folder(options.identity, user_folder())
    if folder is None:
        return
    folder = folder.absolute()
    if versions := unsupported_version():
        raise InvalidInputError(f"wattfleet-superlink with an identity supports {versions}")
    peer = require_identity(folder).peer
    if peer.role is not Role.SUPERLINK:
        raise InvalidInputError(
            f"the identity in {folder} belongs to {peer}, but a SuperLink needs the role superlink: make an invite"
            " with `wattfleet coordinator invite --role superlink --name superlink`, and enrol with `wattfleet join`"
        )
    endpoint = Endpoint.of(options.coordinator, folder)
    certificate, files = None, [given.ssl_certfile, given.ssl_keyfile, given.ssl_ca_certfile]
    if not any(files):
        certificate = ServerCertificate(endpoint, [] if _is_loopback_or_every(given.host) else [given.host])
        if problem := certificate.prepare():
            log(WARNING, "wattfleet-superlink: %s. The stored TLS certificate is used", problem)
        files = [str(each) for each in (certificate.certificate_file, certificate.key_file, certificate.trusted_file)]
        for name, file in zip(("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"), files, strict=True):
            sys.argv += [name, file]
    if not given.enable_supernode_auth:
        sys.argv.append("--enable-supernode-auth")
    os.environ[IDENTITY_VARIABLE] = str(folder)  # for the ServerApps that the SuperLink starts
    # If the authority is replaced, the trusted file beside the TLS certificate is updated within seconds.
    access = ControlAccess(peer.fleet, folder / TRUSTED if certificate is None else certificate.trusted_file)
    _flower.load_control_authn_plugin = lambda: access
    _flower.uvicorn = SimpleNamespace(run=_Serving(endpoint, certificate, access, given, files, options.check_s))


def _is_loopback_or_every(host: str) -> bool:
    return host in _EVERY_HOST or host in ("127.0.0.1", "::1", "localhost")


def serving_config(app: Any, **settings: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for Flower's app, with its Runtime API limited to this machine."""
    # With proxy headers, FORWARDED_ALLOW_IPS could let a caller pretend to come from another address.
    return uvicorn.Config(app=LocalRuntime(app), proxy_headers=False, **settings)


class _Serving:
    """Replaces `uvicorn.run`: serves Flower's app, and keeps its certificates and SuperNodes up to date."""

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
        # Flower has checked that there are three files.
        certificate_file, key_file, trusted_file = paths = [Path(file).expanduser() for file in self._files]
        certificate = self._certificate or WatchedFiles(*paths)
        config = serving_config(ExplainedRefusals(app, lambda key: keeper.is_not_enrolled(key)), **settings)
        config.load()
        context, registry = config.ssl, NodeRegistry(self._control(trusted_file))
        assert context is not None, "the options include TLS files"

        def reload_tls() -> None:
            control = self._control(trusted_file)
            load_pair(context, certificate_file, key_file)
            registry.control = control

        assert self._endpoint.folder is not None, "`_secure` requires an identity"
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
    """Adds the bearer token to Flower's requests."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send a request with the token."""
        context.request.headers["Authorization"] = f"Bearer {self._token}"
        response: httpx.Response = call_next(context)
        return response
