"""Runs a real Flower deployment on loopback: a SuperLink, one SuperNode per device, and runs of apps.

With an identity, SuperLink and SuperNodes use TLS and Flower's node authentication.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import psutil

from wattfleet.common.addresses import COORDINATOR_VARIABLE, IDENTITY_VARIABLE, INSECURE_VARIABLE
from wattfleet.common.identity.identity_folder import LIFETIME, TRUSTED
from wattfleet.common.settings.user_file import FILE_VARIABLE
from wattfleet.core.errors import WattfleetError

# --- Processes --------------------------------------------------------------------------------------------------------
# The child processes of one run. Each has its own log, and all end with the run.


_STOP_GRACE_S = 8.0
_USERS_OWN = (COORDINATOR_VARIABLE, "WATTFLEET_AGENT_", "WATTFLEET_SUPERNODE", IDENTITY_VARIABLE, INSECURE_VARIABLE)
"""Prefixes of the environment variables that are meant for the user's own fleet."""


class PartFailedError(WattfleetError):
    """A part of the run has failed; the text names the part and its log."""


class NoAnswerError(PartFailedError):
    """A command did not answer in time, for example on a busy machine, so its result is unknown. Try again."""


@dataclass(frozen=True)
class Part:
    """One running child process.

    Attributes:
        name: the part's name.
        process: the child process, in its own session.
        log: the file with its output.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def failure(self) -> PartFailedError | None:
        """Return the error to raise if the child has ended; None while it runs."""
        if self.process.poll() is None:
            return None
        return PartFailedError(
            f"{self.name} ended with exit code {self.process.returncode}: {last_line(self.log)} (log: {self.log})"
        )


def last_line(log: Path) -> str:
    """Return the last line of a log that reports an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|wattfleet:", line)] or lines
    return errors[-1] if errors else "it printed nothing"


class Parts:
    """The children of a run. Leaving the context ends them, the last one first."""

    def __init__(self, logs: Path) -> None:
        """Write logs to a directory, which is created if it does not exist."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._parts: list[Part] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], more: Mapping[str, str]) -> Part:
        """Start a child with its output in `<name>.log`. A child that is started again goes on with its log.

        Raises:
            PartFailedError: the program is not installed.
        """
        log = self._logs / f"{name}.log"
        earlier = [part for part in self._parts if part.name == name and part.process.poll() is not None]
        self._parts = [part for part in self._parts if part not in earlier]
        try:
            with log.open("ab" if earlier else "wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(more),
                    start_new_session=True,  # Ctrl-C then reaches only this process, which stops the parts in order
                )
                part = Part(name, process, log)
                self._parts.append(part)
        except FileNotFoundError:
            raise PartFailedError(
                f"{name}: {command[0]} is not installed: pip install 'wattfleet[simulation]'"
            ) from None
        return part

    def check(self) -> None:
        """Make sure that all parts are running.

        Raises:
            PartFailedError: a part has ended.
        """
        for part in self._parts:
            if failure := part.failure():
                raise failure

    def stop(self) -> None:
        """End all parts and the processes that they started: with SIGTERM, and after a while with SIGKILL.

        Stop signals are blocked meanwhile.
        """
        with _signals_blocked():
            # List the children now, since a child whose parent has ended cannot be found any more.
            children = [child for part in self._parts for child in _children(part)]
            for part in reversed(self._parts):
                part.process.terminate()
            give_up_s = time.monotonic() + _STOP_GRACE_S
            for part in reversed(self._parts):
                children += _children(part)
                with suppress(subprocess.TimeoutExpired):
                    part.process.wait(max(0.0, give_up_s - time.monotonic()))
            for part in self._parts:
                part.process.kill()
                part.process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=_STOP_GRACE_S)
            self._parts.clear()


def program(name: str) -> str:
    """Return the path of a program that is installed in this Python environment."""
    return str(Path(sys.executable).parent / name)


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a child.

    Its PATH includes this Python's folder, where Flower finds its own programs. The settings, the settings file and the
    identity of the user's own fleet are left out, since they would change the simulation.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_USERS_OWN)}
    return {**kept, "PATH": path, FILE_VARIABLE: "", **more}


def _children(part: Part) -> list[psutil.Process]:
    try:
        return psutil.Process(part.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- Flower -----------------------------------------------------------------------------------------------------------

HOST = "127.0.0.1"
APP_DIRECTORY = Path(__file__).parent / "digits_app"
_CONNECTION = "fleet"
_READY_WITHIN_S = 180.0
_COMMAND_WITHIN_S = 120.0
_COMPLETED = "finished:completed"
_PORTS = range(20_000, 32_768)

SUPERNODE = (sys.executable, "-P", "-m", "wattfleet.flower.supernode")
"""The command `wattfleet-supernode`, independent of PATH."""

_SUPERLINK = (sys.executable, "-P", "-m", "wattfleet.flower.superlink")

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Flower starts a process per message. More threads in each would only compete for the cores.
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class SuperNodeConfig:
    """The node configuration of a SuperNode.

    Attributes:
        device_id: the device.
        partition: index of its part of the data.
        socket: the unix socket of the device's agent.
        enrolled: folder with the key of an enrolled device's SuperNode; None for plaintext.
    """

    device_id: str
    partition: int
    socket: Path
    enrolled: Path | None = None


def free_ports(count: int) -> list[int]:
    """Return different ports that are free at the moment.

    They are below the range that Linux uses for connections and for servers on port 0. So no other program gets one by
    chance before the intended program listens on it.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            with suppress(OSError):
                stack.enter_context(socket.socket()).bind((HOST, port))
                found.append(port)
        return found


class FlowerDeployment:
    """A SuperLink with its SuperNodes, as parts of a run.

    Attributes:
        address: host:port of the SuperLink.
    """

    def __init__(
        self,
        parts: Parts,
        home: Path,
        nodes: Sequence[SuperNodeConfig],
        supernode: Sequence[str] = SUPERNODE,
        identity: Path | None = None,
    ) -> None:
        """Prepare a deployment.

        Args:
            parts: the run's processes; those of the deployment are added.
            home: Flower's home directory for this run.
            nodes: the SuperNodes to start.
            supernode: the command that runs a SuperNode, without its options.
            identity: folder with the identity of SuperLink, ServerApps and `flwr`. It has to be filled before `start`.
                None for plaintext.
        """
        self._supernode = supernode
        self._parts = parts
        self._nodes = nodes
        self._home = home
        self._port, *self._node_ports = free_ports(1 + len(nodes))
        self.address = f"{HOST}:{self._port}"
        self._identity = identity
        self._connect_again_s = math.inf
        self._environment = {**OFFLINE, "FLWR_HOME": str(home)}

    def start(self, links: Mapping[str, str] = MappingProxyType({})) -> list[Part]:
        """Start the SuperLink, wait until it is healthy, start the SuperNodes and return them.

        Args:
            links: host:port at which a device's SuperNode reaches the SuperLink, if it is not the SuperLink's own
                address.

        Raises:
            PartFailedError: the SuperLink did not start.
        """
        self.start_superlink()
        self.connect()
        return [self.start_supernode(node, links.get(node.device_id)) for node in self._nodes]

    def start_superlink(self) -> Part:
        """Start the SuperLink, or start it again after it has ended, and wait until it is healthy.

        Raises:
            PartFailedError: it did not start.
        """
        if self._identity is None:
            command, identity = [program("flower-superlink"), "--insecure"], {}
        else:
            command, identity = [*_SUPERLINK], {IDENTITY_VARIABLE: str(self._identity)}
        command += ["--host", HOST, "--port", str(self._port), "--disable-runtime-dependency-installation"]
        superlink = self._parts.start("superlink", command, {**self._environment, **identity})
        give_up_s = time.monotonic() + _READY_WITHIN_S
        context = None if self._identity is None else ssl.create_default_context(cafile=self._identity / TRUSTED)
        while not self._healthy(context):
            if failure := superlink.failure():
                raise failure
            if time.monotonic() > give_up_s:
                raise PartFailedError(f"superlink did not answer within {_READY_WITHIN_S:g} s (log: {superlink.log})")
            time.sleep(0.2)
        return superlink

    def start_supernode(self, node: SuperNodeConfig, link: str | None = None) -> Part:
        """Start a SuperNode, or start it again after it has ended.

        Args:
            node: one of the nodes of this deployment.
            link: host:port at which it reaches the SuperLink; None for the SuperLink's own address.
        """
        port = self._node_ports[self._nodes.index(node)]
        return self._parts.start(
            f"supernode-{node.device_id}",
            [
                *self._supernode,
                *("--superlink", link or self.address, "--host", HOST, "--port", str(port)),
                *(["--insecure"] if node.enrolled is None else ["--enrolled", str(node.enrolled)]),
                "--node-config",
                f'device-id="{node.device_id}" partition-id={node.partition} agent-socket="{node.socket}"',
            ],
            self._environment,
        )

    def connect(self) -> None:
        """Configure the SuperLink's address for `flwr`: that of the identity, or that of this deployment.

        Raises:
            PartFailedError: the identity cannot be used.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        if self._identity is None:
            (self._home / "config.toml").write_text(
                f'[superlink]\ndefault = "{_CONNECTION}"\n\n'
                f'[superlink.{_CONNECTION}]\naddress = "{self.address}"\ninsecure = true\n'
            )
            return
        done = self._run(
            [
                program("wattfleet"),
                *("flower", "connect", "--name", _CONNECTION, "--identity", str(self._identity)),
            ]
        )
        if done.returncode != 0:
            raise PartFailedError(f"flwr cannot be connected to the SuperLink: {(done.stderr or done.stdout).strip()}")
        self._connect_again_s = time.monotonic() + LIFETIME.total_seconds() / 2

    def _healthy(self, context: ssl.SSLContext | None) -> bool:
        scheme = "http" if context is None else "https"
        try:
            with urllib.request.urlopen(f"{scheme}://{self.address}/health", timeout=1, context=context) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def submit(self, app: Path, run_config: Mapping[str, str | int | float]) -> str:
        """Start a run and return its id.

        Raises:
            PartFailedError: Flower rejected it.
        """
        command = ["run", str(app), _CONNECTION, "--format", "json"]
        for key, value in run_config.items():
            command += ["-c", f"{key}={json.dumps(value)}"]
        answer = self._flwr(command)
        if "run-id" not in answer:
            raise PartFailedError(f"flwr run did not start the app: {json.dumps(answer)}")
        return str(answer["run-id"])

    def stop(self, run_id: str) -> None:
        """Stop a run, as a user does.

        Raises:
            PartFailedError: Flower refused.
        """
        self._flwr(["stop", run_id, _CONNECTION, "--format", "json"])

    def status(self, run_id: str) -> str:
        """Return the run's status, such as `running` or `finished:completed`."""
        answer = self._flwr(["list", _CONNECTION, "--run-id", run_id, "--format", "json"])
        runs = answer.get("runs")
        if not isinstance(runs, list) or not runs:
            raise PartFailedError(f"flwr list does not know run {run_id}: {json.dumps(answer)}")
        return str(runs[0]["status"])

    def completed(self, run_id: str) -> bool:
        """Whether the run has completed.

        Raises:
            PartFailedError: the run failed or was stopped.
            NoAnswerError: Flower did not answer in time.
        """
        status = self.status(run_id)
        if status.startswith("finished") and status != _COMPLETED:
            raise PartFailedError(f"the Flower run ended as {status!r}")
        return status == _COMPLETED

    def _flwr(self, arguments: Sequence[str]) -> dict[str, object]:
        """Run `flwr`, and return the JSON that it prints."""
        if time.monotonic() > self._connect_again_s:
            self.connect()
        try:
            done = self._run([program("flwr"), *arguments])
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"flwr {arguments[0]} did not answer within {_COMMAND_WITHIN_S:g} s") from None
        try:
            answer = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            raise PartFailedError(f"flwr {arguments[0]} failed: {(done.stderr or done.stdout).strip()}") from None
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise PartFailedError(f"flwr {arguments[0]} failed: {json.dumps(answer)}")
        return answer

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=environment(self._environment),
            capture_output=True,
            text=True,
            timeout=_COMMAND_WITHIN_S,
            check=False,
        )
