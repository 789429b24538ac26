"""The command `wattfleet-supernode`: Flower's SuperNode with shorter delays between messages and trainings."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.common import log
from flwr.common.config import parse_config_args
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

from wattfleet.common.cli import exit_code, print_error
from wattfleet.common.clock import SystemClock
from wattfleet.common.identity.supernode_folder import KEY, TRUSTED, SuperNodeFacts, read_facts
from wattfleet.common.logs import log_format
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.flower import process_log
from wattfleet.flower.flower_version import unsupported_version
from wattfleet.flower.logged_program import changed_copy, start_logged
from wattfleet.flower.supernode.fork_server import FLOWER_POLL_S, Receiver

# --- Own options ------------------------------------------------------------------------------------------------------
# Options of Flower's SuperNode that follow from the device's enrolment. The user's own options take precedence.


ENVIRONMENT_VARIABLE = "WATTFLEET_SUPERNODE"
DEFAULT_FOLDER = Path("/var/lib/wattfleet/supernode")


@dataclass(frozen=True)
class Enrolled:
    """A device's enrolment, as the SuperNode uses it.

    Attributes:
        folder: the folder with the SuperNode's key.
        facts: device id, agent socket and SuperLink address from the enrolment.
    """

    folder: Path
    facts: SuperNodeFacts

    @property
    def trusted_file(self) -> Path:
        """The file with the authorities to trust. It changes when the agent renews its certificate."""
        return self.folder / TRUSTED


def enrolment(named: Path | None, flower_options: Sequence[str]) -> Enrolled | None:
    """Return the enrolment to use; None if there is none, or if the user has switched TLS off.

    Args:
        named: the folder that the user named; None for the environment variable's folder or else the default.
        flower_options: the options for Flower.

    Raises:
        InvalidInputError: the named folder has no key, a folder cannot be read, or options contradict each other.
    """
    given = _given(flower_options)
    if given.insecure:
        if named is not None:
            raise InvalidInputError("--insecure switches TLS off, but --enrolled needs TLS: leave out one of them")
        return None
    if named is None and (variable := os.environ.get(ENVIRONMENT_VARIABLE)):
        named = Path(variable)
    folder = named or DEFAULT_FOLDER
    try:
        facts = read_facts(folder)
    except InvalidInputError:
        if named is None and given.root_certificates is not None:  # the user provides what is needed
            return None
        raise
    if facts is not None:
        return Enrolled(folder.absolute(), facts)
    if named is not None:
        raise InvalidInputError(
            f"{folder} has no SuperNode key: enrol the device with `wattfleet agent join`, or name the folder"
            " `supernode` in the agent's state directory"
        )
    return None


def further_options(enrolled: Enrolled, flower_options: Sequence[str]) -> list[str]:
    """Return the options for Flower, extended by those that follow from an enrolment.

    Raises:
        InvalidInputError: the SuperLink's address is not known, or the node configuration cannot be read.
    """
    given, facts = _given(flower_options), enrolled.facts
    further: list[str] = []
    if given.superlink is None:
        if not facts.superlink:
            raise InvalidInputError(
                "the SuperLink's address is not known: pass --superlink HOST:PORT, or restart the coordinator with"
                " --superlink-address HOST:PORT and enrol the device again"
            )
        further += ["--superlink", facts.superlink]
    if given.root_certificates is None:
        further += ["--root-certificates", str(enrolled.trusted_file)]
    if given.auth_supernode_private_key is None:
        further += ["--auth-supernode-private-key", str(enrolled.folder / KEY)]
    own = {"device-id": facts.device_id} | ({"agent-socket": facts.agent_socket} if facts.agent_socket else {})
    return [*flower_options, *further, "--node-config", _node_config(given.node_config, own)]


def _node_config(given: str | None, own: dict[str, str]) -> str:
    """Return the node configuration, extended by the device's own keys unless it has them already."""
    try:
        values = parse_config_args([given] if given else None)
    except Exception as error:  # errors of Flower, of TOML and of reading the file
        raise InvalidInputError(f"--node-config: {error}") from None
    return " ".join(f"{key}={json.dumps(value)}" for key, value in {**own, **values}.items())


def _given(flower_options: Sequence[str]) -> argparse.Namespace:
    """Parse the Flower options that matter here. Flower parses and checks all of its options itself."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--superlink", "--root-certificates", "--auth-supernode-private-key", "--node-config"):
        parser.add_argument(name)
    parser.add_argument("--insecure", action="store_true")
    return parser.parse_known_args(flower_options)[0]


# --- Command ----------------------------------------------------------------------------------------------------------

# The package exports a function of the module's name.
_flower: Any = importlib.import_module("flwr.supernode.cli.flower_supernode")
_CONNECTION = "flwr.supernode.fleet_http_connection"
_TASK_POLL_S = 0.2
_REPLY_POLL_S = 0.1
_LEARNED = "learned"
_NONE = "none"


def main() -> None:
    """Run the SuperNode."""
    parser = own_options_parser()
    options, flower_options = parser.parse_known_args()
    sys.argv[1:] = flower_options
    if {"-h", "--help"} & set(flower_options):
        parser.print_help()
        print("\nThe other options are Flower's own:\n", flush=True)
    else:
        try:
            process_log.start(options)
            _log_as_chosen()
            enrolled = enrolment(options.enrolled, flower_options)
            if enrolled is not None:
                sys.argv[1:] = further_options(enrolled, flower_options)
        except WattfleetError as error:
            print_error(f"wattfleet-supernode: {error}")
            sys.exit(exit_code(error))
        if reason := _unsupported():
            log(WARNING, "wattfleet-supernode runs as flower-supernode: %s", reason)
        else:
            _change(options)
            _keep_connected(enrolled, flower_options)
    flower_supernode()


def _log_as_chosen() -> None:
    """If the log is JSON, also log the lines of the SuperNode's uvicorn as JSON."""
    if log_format() == "json" and hasattr(_flower, "uvicorn"):  # Flower 1.30 has no uvicorn here
        _flower.uvicorn = changed_copy(_flower.uvicorn, Config=partial(_flower.uvicorn.Config, log_config=None))


def own_options_parser() -> argparse.ArgumentParser:
    """Return a parser of Wattfleet's own options; all other options are passed on to Flower."""
    parser = argparse.ArgumentParser(
        prog="wattfleet-supernode",
        usage="%(prog)s [--enrolled FOLDER] [--poll-s S] [--warm-imports NAMES] [--log-format FORMAT]"
        " [--log-level LEVEL] [options of flower-supernode]",
        description="Start a Flower SuperNode that fetches messages sooner and starts apps faster. On an enrolled"
        " device, it needs no further options.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--enrolled",
        type=Path,
        metavar="FOLDER",
        help="read the device's key, the authorities to trust and the SuperLink's address from this folder, which"
        f" `wattfleet agent join` makes (default: {ENVIRONMENT_VARIABLE}, or {DEFAULT_FOLDER})",
    )
    parser.add_argument(
        "--poll-s",
        type=_poll_s,
        default=0.25,
        metavar="S",
        help="set the shortest pause between two requests for a message, in seconds (default: %(default)s). "
        f"The pause grows while no message comes, up to Flower's {FLOWER_POLL_S:g} s",
    )
    parser.add_argument(
        "--warm-imports",
        default=_LEARNED,
        metavar="NAMES",
        help=f"set which modules are imported before a message comes: '{_LEARNED}' for those that the app imported"
        f" for its first message (default), names such as 'torch,numpy', or '{_NONE}' to start each message's"
        " process as Flower does",
    )
    process_log.add_options(parser)
    return parser


def _poll_s(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 60:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and 60 s")
    return value


def _unsupported() -> str:
    """Return why this Flower cannot be modified; empty if it can."""
    if versions := unsupported_version():
        return f"it supports {versions}"
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    for module, name in (
        (_flower, "start_client_internal"),
        (start_client_internal, "http_request_response"),
        (start_client_internal, "time"),
        (importlib.import_module(_CONNECTION), "FleetHttpClient"),
        *((m, "subprocess") for m in (start_client_internal, executor)),
    ):
        if not hasattr(module, name):
            return f"Flower's {module.__name__} has no {name}"
    return ""


def _change(options: argparse.Namespace) -> None:
    """Replace how Flower's SuperNode polls for messages, and how it starts its SuperExec."""
    connect = start_client_internal.http_request_response

    @contextmanager
    def connect_patiently(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, ...]]:
        with connect(*args, **kwargs) as (node_id, receive, *others):
            yield node_id, Receiver(receive, options.poll_s, SystemClock()), *others

    start_client_internal.http_request_response = connect_patiently
    start_client_internal.time = SimpleNamespace(sleep=_pause)
    if options.warm_imports == _NONE:
        start_logged(start_client_internal)
    else:
        start_client_internal.subprocess = SimpleNamespace(Popen=_superexec(options.warm_imports))


def _keep_connected(enrolled: Enrolled | None, flower_options: Sequence[str]) -> None:
    """Make Flower's SuperNode survive a restart of the SuperLink.

    Args:
        enrolled: the enrolment of the device; it is not used if the user passed --root-certificates.
        flower_options: the options for Flower.
    """
    # Other versions of Flower do not have what this imports.
    from flwr.supercore.exit import ExitCode, flwr_exit

    from wattfleet.flower.supernode.fleet_client import EnrolledClient, SteadyClient

    connection: Any = importlib.import_module(_CONNECTION)
    start = start_client_internal.start_client_internal
    names_roots = any(each.split("=")[0] == "--root-certificates" for each in flower_options)
    factories: list[Any] = []

    def start_with_state(*, state_factory: Any, **options: Any) -> None:
        factories.append(state_factory)
        start(state_factory=state_factory, **options)
        # Flower has logged an error. On its own, it would leave a process that handles no messages.
        flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, "The SuperNode cannot go on: start it again.")

    def note_id(node_id: int) -> None:
        for factory in factories:
            factory.state().set_node_id(node_id)

    def connect(address: str, insecure: bool, roots: Any, interceptors: Sequence[Any]) -> SteadyClient:
        client: SteadyClient
        if enrolled is None or names_roots:
            client = SteadyClient.from_server_address(address, insecure, roots, interceptors)
        else:
            client = EnrolledClient(address, enrolled.trusted_file, interceptors)
        client.on_new_id = note_id  # apps see the node id of the SuperNode's own state
        return client

    _flower.start_client_internal = start_with_state
    connection.FleetHttpClient = SimpleNamespace(from_server_address=connect)


def _pause(seconds: float) -> None:
    """Replace the SuperNode's `time.sleep`: shorten its 0.5 s between two polls for the app's reply."""
    time.sleep(_REPLY_POLL_S if seconds < 1 else seconds)


def _superexec(warm_imports: str) -> Callable[[Sequence[str]], object]:
    names = [] if warm_imports == _LEARNED else [name for name in warm_imports.split(",") if name]
    settings = {"learn": warm_imports == _LEARNED, "imports": names, "task_poll_s": _TASK_POLL_S}

    def start(command: Sequence[str]) -> object:
        # Without -P, Python would import modules from the working folder, which flower-superexec does not.
        module = [sys.executable, "-P", "-m", "wattfleet.flower.supernode.superexec", json.dumps(settings)]
        return subprocess.Popen([*module, *command[1:]])

    return start
