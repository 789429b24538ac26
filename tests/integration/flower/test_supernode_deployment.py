"""`wattfleet-supernode` with a real SuperLink, and a board over TLS that was set up by pasting one line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from flwr.proto.control_pb2 import ListNodesRequest

from tests.fakes.polling import until
from tests.fakes.real_processes import AppRun
from tests.fakes.served import CertifiedFleet
from tests.fakes.short_forms import first
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.identity_folder import read_identity
from wattfleet.common.identity.supernode_folder import SuperNodeKey
from wattfleet.simulation.flower import (
    OFFLINE,
    FlowerDeployment,
    Part,
    Parts,
    SuperNodeConfig,
    environment,
    free_ports,
    program,
)
from wattfleet.simulation.run import CoordinatorView

# --- Supernode deployment ---------------------------------------------------------------------------------------------
# `wattfleet-supernode` with a real SuperLink, and an app that trains nothing.


pytestmark = pytest.mark.deployment

OVERHEAD_APP = Path(__file__).parents[3] / "benchmarks" / "round_overhead" / "app"
RUNTIME = "Each message starts a new process"


@dataclass
class Running:
    """A SuperLink with one SuperNode that runs rounds."""

    deployment: FlowerDeployment
    superlink: Part
    supernode: Part
    result: Path
    run_id: str = ""

    def rounds(self) -> list[dict[str, float]]:
        """The rounds that have ended."""
        if not self.result.exists():
            return []
        return [json.loads(line) for line in self.result.read_text().splitlines() if line.endswith("}")]

    def fork_servers(self) -> list[psutil.Process]:
        """The fork servers, without the processes that they have forked."""
        children = psutil.Process(self.supernode.process.pid).children(recursive=True)
        servers = [child for child in children if "fork_server" in " ".join(_command(child))]
        return [server for server in servers if server.ppid() not in {other.pid for other in servers}]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Parts(tmp_path / "logs") as parts:
        node = SuperNodeConfig("a", 0, tmp_path / "none.sock")
        deployment = FlowerDeployment(parts, tmp_path / "home", [node])
        superlink = deployment.start_superlink()
        deployment.connect()
        supernode = deployment.start_supernode(node)
        result = tmp_path / "rounds.jsonl"
        running = Running(deployment, superlink, supernode, result)
        until(lambda: len(running.fork_servers()) == 1)
        config = {"rounds": 8, "devices": 1, "waiting": "wattfleet", "result": str(result)}
        running.run_id = deployment.submit(OVERHEAD_APP, config)
        yield running


# The short form is `test_a_killed_server_is_replaced_by_flowers_own_start`.
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_rounds_go_on_when_the_fork_server_is_killed(running: Running) -> None:
    until(lambda: len(running.rounds()) >= 3)
    for server in running.fork_servers():
        server.kill()
    until(lambda: len(running.rounds()) == 8)
    assert all(len(each["nodes"]) == 1 for each in running.rounds()), "no message was lost"
    warnings = [line for line in running.supernode.log.read_text().splitlines() if RUNTIME in line]
    assert len(warnings) == 1 and "the fork server has ended" in warnings[0]


# An enrolled device does so in the long form of `test_one_line_enrols_a_board_and_revoking_it_ends_it`.
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_plain_supernode_returns_to_a_superlink_that_was_restarted(running: Running) -> None:
    until(lambda: len(running.rounds()) >= 2)
    running.superlink.process.kill()
    running.superlink.process.wait()
    running.deployment.start_superlink()
    until(lambda: "has accepted this SuperNode again" in running.supernode.log.read_text(), within_s=120.0)
    before = len(running.rounds())
    config = {"rounds": 2, "devices": 1, "waiting": "wattfleet", "result": str(running.result)}
    running.deployment.submit(OVERHEAD_APP, config)
    until(lambda: len(running.rounds()) == before + 2, within_s=120.0)


# The short form is `test_a_server_ends_with_the_process_that_started_it`.
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_nothing_is_left_when_the_supernode_is_terminated(running: Running) -> None:
    until(lambda: len(running.rounds()) >= 2)
    servers = running.fork_servers()
    others = psutil.Process(running.supernode.process.pid).children(recursive=True)
    temporary = [Path(path) for path in re.findall(r"\S*/wattfleet-supernode-\w+", " ".join(servers[0].cmdline()))]
    assert temporary and all(path.is_dir() for path in temporary)
    running.supernode.process.send_signal(signal.SIGTERM)
    running.supernode.process.wait(timeout=30)
    _, alive = psutil.wait_procs([*servers, *others], timeout=30)
    assert not alive
    assert not any(path.exists() for path in temporary)


# --- Enrolled deployment ----------------------------------------------------------------------------------------------
# A board with an agent, a SuperLink and a SuperNode over TLS with node authentication, set up by pasting one line.
#
# In the long form, the agent and the SuperLink are killed on the way. `tests/faults/test_processes.py` kills every
# process at every stage.


BOARDS_APP = Path(__file__).parents[2] / "faults" / "boards_app"
HOST = "127.0.0.1"
_WITHIN_S = 400.0


def wait_until(what: str, condition: Callable[[], object]) -> None:
    """Wait until a condition holds, on a machine that may be busy."""
    give_up_s = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_s, f"{what}: not within {_WITHIN_S:g} s"
        time.sleep(0.1)


@dataclass
class Deployment:
    """A coordinator and a SuperLink as processes, and the settings for running commands beside them."""

    folder: Path
    parts: Parts
    coordinator: str
    superlink: str
    log: Path
    processes: dict[str, Part] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**OFFLINE, "FLWR_HOME": str(self.folder / "flower"), "HOME": str(self.folder), "WATTFLEET_IDENTITY": ""}

    def command(self, *words: str, line: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command as a user would; returns its output."""
        return subprocess.run(
            [program(words[0]), *words[1:]],
            env=environment(self.environment),
            cwd=self.folder,
            input=line,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )

    def done(self, *words: str, line: str = "") -> str:
        """The output of a command, which has to succeed."""
        result = self.command(*words, line=line)
        assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
        return result.stdout

    def invite(self, *options: str) -> str:
        """The line that an invite prints."""
        out = self.done("wattfleet", "coordinator", "invite", "--coordinator", self.coordinator, "--json", *options)
        return str(json.loads(out)["line"])

    def enrol(self, device_id: str) -> Path:
        """Enrol a simulated board by one line; returns the folder of its SuperNode."""
        state = self.folder / device_id
        words = ("--device", "simulated:orin-nano", "--device-id", device_id, "--state-dir", str(state))
        self.done("wattfleet", "agent", "join", *words, line=self.invite("--device", device_id))
        return state / "supernode"

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again after it has ended."""
        command = ["--identity", str(self.folder / "superlink"), "--check-s", "0.5", "--host", HOST]
        port = self.superlink.partition(":")[2]
        command += ["--port", port, "--disable-runtime-dependency-installation"]
        self.processes["superlink"] = self.parts.start(
            "superlink", [program("wattfleet-superlink"), *command], self.environment
        )

    def start_agent(self, device_id: str) -> None:
        """Start a board's agent, or start it again after it has ended."""
        options = ["--device", "simulated:orin-nano", "--device-id", device_id, "--coordinator", self.coordinator]
        options += ["--state-dir", str(self.folder / device_id), "--socket", str(self.folder / f"{device_id}.sock")]
        self.processes["agent"] = self.parts.start(
            "agent", [program("wattfleet"), "agent", "run", *options], self.environment
        )
        wait_until("the agent listens", lambda: (self.folder / f"{device_id}.sock").exists())

    def kill(self, name: str) -> None:
        process = self.processes[name].process
        process.kill()
        process.wait()

    def start_supernode(self, name: str, *options: str, program_name: str = "wattfleet-supernode") -> Part:
        [port] = free_ports(1)
        command = [program(program_name), "--host", HOST, "--port", str(port), *options]
        return self.parts.start(name, command, self.environment)

    def nodes(self) -> dict[str, str]:
        """Status of each SuperNode by Flower's id, as the user's `flwr` lists them."""
        found = json.loads(self.done("flwr", "supernode", "list", "wattfleet", "--format", "json"))
        return {node["node-id"]: node["status"] for node in found["nodes"]}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    tmp_path = tmp_path_factory.mktemp("deployment")
    port, metrics, superlink_port = free_ports(3)
    with Parts(tmp_path / "logs") as parts:
        (tmp_path / "flower").mkdir()
        coordinator, superlink = f"{HOST}:{port}", f"localhost:{superlink_port}"
        made = Deployment(tmp_path, parts, coordinator, superlink, tmp_path / "logs" / "superlink.log")
        made.done("wattfleet", "coordinator", "init", "--identity", str(tmp_path / "wattfleet-identity"))
        addresses = ["--address", coordinator, "--http-address", f"{HOST}:{metrics}"]
        store = ["--store", str(tmp_path / "store.db"), "--identity", str(tmp_path / "wattfleet-identity")]
        serve = [*addresses, *store, "--site-budget-w", "60", "--superlink-address", superlink]
        served = parts.start("coordinator", [program("wattfleet"), "coordinator", "serve", *serve], made.environment)
        wait_until("the coordinator serves", lambda: served.failure() or "coordinator serves" in served.log.read_text())
        parts.check()
        identity = tmp_path / "superlink"
        made.done(
            "wattfleet", "join", "--identity", str(identity), line=made.invite("--role", "superlink", "--name", "s")
        )
        made.start_superlink()
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_kills", first(1, [False, True]), ids=["undisturbed", "with kills"])
@pytest.mark.slow
def test_one_line_enrols_a_board_and_revoking_it_ends_it(deployment: Deployment, with_kills: bool) -> None:
    device_id = f"nano-{int(with_kills)}"
    supernode_folder = deployment.enrol(device_id)
    deployment.start_agent(device_id)
    # No further options: address, authorities, key, device id and socket come from the enrolment.
    supernode = deployment.start_supernode("supernode", "--enrolled", str(supernode_folder))
    wait_until("it is registered", lambda: f"SuperNode of {device_id} is registered" in deployment.log.read_text())
    operator = str(deployment.folder / "wattfleet-identity" / "operator")
    connect = ("wattfleet", "flower", "connect", "--identity", operator, "--coordinator", deployment.coordinator)
    deployment.done(*connect)
    wait_until("the SuperNode is connected", lambda: "SuperNode ID: " in supernode.log.read_text())

    # The user's app trains.
    notes = deployment.folder / f"{device_id}.jsonl"
    config = {"rounds": 100, "devices": 1, "train-s": 1.0 if with_kills else 0.2, "notes": str(notes)}
    options = [word for key, value in config.items() for word in ("-c", f"{key}={json.dumps(value)}")]
    started = json.loads(deployment.done("flwr", "run", str(BOARDS_APP), "wattfleet", "--format", "json", *options))
    with CoordinatorView(Endpoint.of(deployment.coordinator, Path(operator))) as view:
        run = AppRun(str(started["run-id"]), notes, view)
        wait_until("the board trains", lambda: run.notes("trains"))
        if with_kills:  # the run waits for the board, and goes on when the agent is back
            deployment.kill("agent")
            wait_until("the board is asked again, twice", lambda: len(run.notes("asked")) >= 3 or run.has_ended())
            assert not run.has_ended(), run.seen().run.error
        before = len(run.notes("closed", replies=1))
        if with_kills:
            deployment.start_agent(device_id)
        wait_until("a further round has ended", lambda: len(run.notes("closed", replies=1)) > before)

        # The user stops it.
        deployment.done("flwr", "stop", run.run_id, "wattfleet")
        wait_until("the run has ended", run.has_ended)
        assert run.seen().run.error == "stopped by Flower's SuperLink, as after `flwr stop`"

    # A SuperLink that was killed and started again knows no SuperNode. The SuperNode returns by itself.
    if with_kills:
        deployment.kill("superlink")
        deployment.start_superlink()
        wait_until("the SuperNode is back", lambda: "has accepted this SuperNode again" in supernode.log.read_text())
        assert "revoked" not in supernode.log.read_text()

    # Revoking the board's certificate unregisters its SuperNode, which ends.
    deployment.done("wattfleet", "coordinator", "revoke", device_id, "--coordinator", deployment.coordinator)
    wait_until("it is unregistered", lambda: f"SuperNode of {device_id} is unregistered" in deployment.log.read_text())
    assert "unregistered" in deployment.nodes().values()
    wait_until("its SuperNode ends", lambda: supernode.process.poll() is not None)
    assert "it was revoked or forgotten" in supernode.log.read_text()


# The short forms are `test_superlink_keeper`, `test_supernode` and the unit tests of the SuperLink.
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_strangers_are_refused(deployment: Deployment) -> None:
    wait_until("the SuperLink serves", lambda: "Uvicorn running" in deployment.log.read_text())
    trusted = deployment.folder / "superlink" / "trusted.pem"
    # A SuperNode with a key that nobody has enrolled.
    key = deployment.folder / "stranger.key"
    key.write_bytes(SuperNodeKey.create().private)
    options = ("--superlink", deployment.superlink, "--root-certificates", str(trusted))
    stranger = deployment.start_supernode(
        "stranger", *options, "--auth-supernode-private-key", str(key), program_name="flower-supernode"
    )
    wait_until("the stranger ends", lambda: stranger.process.poll() is not None)
    assert "Exit Code: 305" in stranger.log.read_text()
    # A SuperNode without a key cannot register itself.
    keyless = deployment.start_supernode("keyless", *options, program_name="flower-supernode")
    wait_until("the SuperNode without a key ends", lambda: keyless.process.poll() is not None)
    assert "Exit Code: 305" in keyless.log.read_text()
    # A SuperNode that trusts another fleet does not connect, and reports why.
    other = CertifiedFleet.create(deployment.folder / "other").authority.trusted_pem
    folder = deployment.enrol("misled")
    (folder / "trusted.pem").write_bytes(other)
    misled = deployment.start_supernode("misled", "--enrolled", str(folder))
    wait_until(
        "it says why", lambda: "was not issued by the authority of this device's fleet" in misled.log.read_text()
    )
    # A user without credentials is refused, and told what to do.
    content = {"content": ListNodesRequest().SerializeToString(), "headers": {"content-type": "application/x-protobuf"}}
    identity = read_identity(deployment.folder / "superlink")
    assert identity is not None
    verify = httpx.create_ssl_context()
    verify.load_verify_locations(cadata=identity.trusted_pem.decode())
    with httpx.Client(verify=verify) as client:
        refused = client.post(f"https://{deployment.superlink}/v1/control/list-nodes", **content)
    assert refused.status_code == httpx.codes.FORBIDDEN
    assert "wattfleet flower connect" in refused.text
