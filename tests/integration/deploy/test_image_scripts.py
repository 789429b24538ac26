"""The scripts that build images or run in them: health, enrolment at the first start, and the rounds."""

from __future__ import annotations

import asyncio
import runpy
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.client import CoordinatorClient
from coordinator.identity.authority_folder import AuthorityFolder, folder_of, make_operator
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import CertifiedFleet, certified, serving
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.channels import Endpoint, require_identity
from wattfleet.simulation.flower import NoAnswerError, PartFailedError
from wattfleet.simulation.run import NotInTimeError, RunSeen, await_ready, await_run, require_observed
from wattfleet_proto.v1 import planning_pb2, session_pb2, view_pb2

# --- Image scripts ----------------------------------------------------------------------------------------------------
# The scripts that build images or are installed in them, and the commands in Dockerfiles.


ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "deploy" / "image"


def test_an_extra_that_names_the_project_is_followed() -> None:
    pytest.importorskip("tomllib", reason="images have Python 3.11, whose standard library reads TOML")
    requirements = runpy.run_path(str(ROOT / "dependencies" / "requirements.py"))["requirements"]
    project = {
        "name": "wattfleet",
        "dependencies": ["numpy>=1"],
        "optional-dependencies": {
            "agent": ["grpcio"],
            "coordinator": ["grpcio", "sqlalchemy>=2"],
            "wattfleet.simulation": ["wattfleet[agent, coordinator]", "psutil"],
        },
    }
    assert requirements(project, "agent") == ["grpcio", "numpy>=1"]
    assert requirements(project, "wattfleet.simulation") == ["grpcio", "numpy>=1", "psutil", "sqlalchemy>=2"]


def healthcheck(*addresses: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-IS", IMAGE / "healthcheck.py", *addresses],
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_healthy_is_when_every_address_answers(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        up = f"tcp:127.0.0.1:{tcp.getsockname()[1]}"
        assert healthcheck(up, f"unix:{path}").returncode == 0

        absent = healthcheck(up, f"unix:{tmp_path / 'other.sock'}")
    assert absent.returncode == 1
    assert "other.sock" in absent.stderr


def test_a_socket_that_nobody_listens_on_is_not_healthy(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
    assert path.exists()
    assert healthcheck(f"unix:{path}").returncode == 1


def test_a_server_without_tls_is_not_healthy_where_tls_is_expected(tmp_path: Path) -> None:
    authority = CertifiedFleet.create(tmp_path / "authority").authority
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.folder / "server.pem", authority.folder / "server.key")
    with ThreadPoolExecutor() as threads, socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tls:127.0.0.1:{server.getsockname()[1]}"

        def serve(protected: bool) -> None:
            connection, _ = server.accept()
            with connection:
                if protected:
                    context.wrap_socket(connection, server_side=True).close()
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        for protected, returncode in ((True, 0), (False, 1)):
            served = threads.submit(serve, protected)
            assert healthcheck(address).returncode == returncode
            served.result(20)


# --- Enrolment scripts ------------------------------------------------------------------------------------------------
# The fleet in containers enrols by itself at its first start, and not again at later starts.

MACHINES = [("device", "orin-0"), ("superlink", "superlink")]


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folder = tmp_path / "authority"
    make_operator(AuthorityFolder.create(folder, ["127.0.0.1"], utc_now()), utc_now())
    return folder


@pytest.fixture
def invites_script() -> dict[str, Any]:
    return runpy.run_path(str(IMAGE / "make_invites.py"))


def started(command: list[str], state: Path, invite: Path) -> subprocess.CompletedProcess[str]:
    """Run a container's start script."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "WATTFLEET_INVITE": str(invite),
        "WATTFLEET_IDENTITY": str(state / "identity"),
    }
    return subprocess.run(
        [sys.executable, IMAGE / "enrolled.py", *command], env=environment, capture_output=True, text=True, timeout=120
    )


async def test_machines_enrol_once_with_the_invites_that_were_made(
    config: CoordinatorSettings, authority: Path, tmp_path: Path, invites_script: dict[str, Any]
) -> None:
    invites = tmp_path / "invites"
    invites.mkdir()
    async with serving(certified(config, authority)) as served:

        def invited() -> list[str]:
            with CoordinatorClient(Endpoint.of(served.bound.address, folder_of(authority))) as client:
                return invites_script["make_invites"](client, MACHINES, invites)

        async def start(state: Path, name: str, *command: str) -> subprocess.CompletedProcess[str]:
            return await asyncio.to_thread(started, [*command], tmp_path / state, invites / name)

        assert await asyncio.to_thread(invited) == ["orin-0", "superlink"]
        first_line = (invites / "orin-0").read_text()
        assert stat.S_IMODE((invites / "orin-0").stat().st_mode) == 0o600
        # Nobody has used the invites: the next start creates others, and revokes the first ones.
        assert await asyncio.to_thread(invited) == ["orin-0", "superlink"]
        assert (invites / "orin-0").read_text() != first_line

        state = tmp_path / "orin-0"
        device = ["--device=simulated:orin-nano", "--device-id=orin-0", f"--state-dir={state}", "--print-config"]
        agent = await start(Path("orin-0"), "orin-0", "wattfleet", "agent", "run", *device)
        assert agent.returncode == 0, agent.stderr
        assert "[device]" in agent.stdout, "the command has run after the enrolment"
        flower = await start(Path("superlink"), "superlink", "wattfleet", "--help")
        assert flower.returncode == 0, flower.stderr
        assert str(require_identity(tmp_path / "superlink" / "identity").peer) == "superlink superlink"
        serial = require_identity(state / "identity").certificate.serial
        assert list(invites.iterdir()) == []

        assert await asyncio.to_thread(invited) == []
        again = await start(Path("orin-0"), "orin-0", "wattfleet", "agent", "run", *device)
        assert again.returncode == 0, again.stderr
        assert require_identity(state / "identity").certificate.serial == serial

        # The first invite was revoked: whoever kept it cannot enrol as the device.
        (invites / "orin-0").write_text(first_line)
        device[2] = f"--state-dir={tmp_path / 'thief'}"
        refused = await start(Path("thief"), "orin-0", "wattfleet", "agent", "run", *device)
        assert refused.returncode != 0
        assert "unknown, has expired, or was used up" in refused.stderr
        assert "[device]" not in refused.stdout
        # A machine that is already enrolled continues without an invite.
        device[2] = f"--state-dir={state}"
        gone_on = await start(Path("orin-0"), "orin-0", "wattfleet", "agent", "run", *device)
        assert "[device]" in gone_on.stdout, gone_on.stderr


async def test_prometheus_gets_a_viewers_certificate_that_its_group_reads(
    config: CoordinatorSettings, authority: Path, tmp_path: Path, invites_script: dict[str, Any]
) -> None:
    folder = tmp_path / "prometheus"
    trusted_pem = require_identity(folder_of(authority)).trusted_pem
    async with serving(certified(config, authority)) as served:

        def made(trusted_pem: bytes = trusted_pem) -> bool:
            with CoordinatorClient(Endpoint.of(served.bound.address, folder_of(authority))) as client:
                return invites_script["make_prometheus_certificate"](client, folder, trusted_pem)

        assert await asyncio.to_thread(made)
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "key.pem")}
        assert modes == {"prometheus": 0o750, "key.pem": 0o640}
        certificate = invites_script["Certificate"].from_pem((folder / "certificate.pem").read_bytes())
        assert str(certificate.peer) == "viewer prometheus"
        assert certificate.remaining(utc_now()).days >= 364
        assert not await asyncio.to_thread(made)
        assert await asyncio.to_thread(made, b"another authority"), "an earlier fleet's certificate is replaced"


# --- Run rounds -------------------------------------------------------------------------------------------------------
# The one-shot service that runs the rounds: it waits for the fleet, and exits with the result of Flower's run.

READY, PROFILING = session_pb2.DEVICE_STATE_READY, session_pb2.DEVICE_STATE_PROFILING


@pytest.fixture
def rounds_script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[3] / "deploy" / "image" / "run_rounds.py"))


class RecordedView:
    """A coordinator that returns recorded responses in order, and then repeats the last one."""

    def __init__(
        self,
        runs: list[RunSeen] | None = None,
        fleets: list[list[view_pb2.DeviceView]] | None = None,
    ) -> None:
        self._runs = runs or []
        self._fleets = fleets or []

    def run(self, run_id: str) -> RunSeen:
        recorded = self._runs.pop(0) if len(self._runs) > 1 else self._runs[0]
        return recorded if recorded.run.run_id == run_id else RunSeen()

    def devices(self) -> list[view_pb2.DeviceView]:
        return self._fleets.pop(0) if len(self._fleets) > 1 else self._fleets[0]


def answers(*results: bool | PartFailedError) -> Callable[[str], bool]:
    """Flower's responses, one after the other."""
    remaining = list(results)

    def completed(run_id: str) -> bool:
        assert run_id == "7"
        result = remaining.pop(0)
        if isinstance(result, PartFailedError):
            raise result
        return result

    return completed


@dataclass
class Flower:
    """Flower's command line with recorded responses."""

    completed: Callable[[str], bool]


def wait(view: Any, flower: Callable[[str], bool], on_poll: Callable[[RunSeen], None] = lambda _: None) -> None:
    await_run(view, "7", flower, 60.0, 0.0, on_poll, ask_flower_every_s=1e6)


def ended_round(number: int, **more: Any) -> view_pb2.RoundView:
    plan = planning_pb2.PlanRoundResponse(
        assignments=[planning_pb2.Assignment(device_id=name) for name in ("agx-orin-0", "orin-nx-0")],
        duration_s=96.4,
        site_budget_w=100,
    )
    return view_pb2.RoundView(round=number, plan=plan, wall_s=9.0, metrics={"accuracy": 0.442}, devices=2, **more)


def run(*rounds: view_pb2.RoundView, run_id: str = "7", **more: Any) -> RunSeen:
    return RunSeen(view_pb2.RunView(run_id=run_id, **more), rounds)


def test_every_round_is_told_once_even_the_last(
    rounds_script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = ended_round(1, observed_site_w=96.16, observed_s=98.3)
    view = RecordedView([run(), run(first), run(first), run(first, ended_round(2), finished=True)])
    wait(view, answers(False, True), rounds_script["RoundPrinter"]())
    assert capsys.readouterr().out.splitlines() == [
        "round 1: agx-orin-0, orin-nx-0; 96.2 W of 100 W; 98 s, predicted 96 s; accuracy 44.2%",
        "round 2: agx-orin-0, orin-nx-0; accuracy 44.2%",
    ]


def test_a_slow_answer_of_flower_ends_nothing(
    rounds_script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    silent = NoAnswerError("flwr list did not answer within 120 s")
    flower = Flower(answers(silent, silent, True))
    view: Any = RecordedView([run(), run(finished=True)])
    await_run(
        view, "7", lambda run_id: rounds_script["completed"](flower, view, run_id), 60.0, 0.0, ask_flower_every_s=-1.0
    )
    assert capsys.readouterr().out == 2 * "flwr list did not answer within 120 s; asking again\n"


def test_an_earlier_run_is_not_taken_for_this_one(
    rounds_script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = run(ended_round(1), run_id="6", finished=True, error="an old failure")
    wait(RecordedView([earlier, earlier, run(finished=True)]), answers(True), rounds_script["RoundPrinter"]())
    assert capsys.readouterr().out == ""


def test_a_failed_run_fails_with_the_coordinators_reason(rounds_script: dict[str, Any]) -> None:
    failure = PartFailedError("the Flower run ended as 'finished:failed'")
    # Flower may report the end before the coordinator is queried again.
    view = RecordedView([run(), run(error="PlanningError: 20 W cannot carry one device")])
    view.run("7")
    with pytest.raises(PartFailedError, match="finished:failed'.*20 W cannot carry one device"):
        rounds_script["completed"](Flower(answers(failure)), view, "7")


def test_a_reason_that_comes_with_flowers_answer_is_told() -> None:
    # The run fails after the coordinator was queried, and before Flower is.
    view = RecordedView([run(), run(error="PlanningError: 20 W cannot carry one device", finished=True)])

    def tell(seen: RunSeen) -> None:
        if seen.run.error:
            raise PartFailedError(f"the Flower run failed: {seen.run.error}")

    with pytest.raises(PartFailedError, match="failed: .*20 W cannot carry one device"):
        await_run(view, "7", answers(PartFailedError("ended")), 60.0, 0.0, tell, ask_flower_every_s=-1.0)  # type: ignore[arg-type]


def test_a_run_that_never_reached_the_coordinator_shows_flowers_log(rounds_script: dict[str, Any]) -> None:
    shown: list[str] = []
    rounds_script["explained"].__globals__["print_log"] = shown.append
    failure = PartFailedError("the Flower run ended as 'finished:failed'")
    with pytest.raises(PartFailedError, match="finished:failed'.*log above"):
        rounds_script["completed"](Flower(answers(failure)), RecordedView([run(run_id="")]), "7")
    assert shown == ["7"]


def test_a_log_that_does_not_end_hides_no_reason(
    rounds_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = tmp_path / "flwr"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    names = rounds_script["print_log"].__globals__
    monkeypatch.setitem(names, "program", lambda name: str(hanging))
    monkeypatch.setitem(names, "LOG_WITHIN_S", 0.01)
    failure = PartFailedError("the Flower run ended as 'finished:failed'")
    with pytest.raises(PartFailedError, match="finished:failed"):
        rounds_script["completed"](Flower(answers(failure)), RecordedView([run(run_id="")]), "7")
    assert "flwr log did not end within 0.01 s" in capsys.readouterr().out


def test_a_completed_run_in_which_nobody_trained_is_a_failure() -> None:
    one_failed = ended_round(1, failed=["agx-orin-0"])
    all_failed = ended_round(2, failed=["agx-orin-0", "orin-nx-0"])
    wait(RecordedView([run(one_failed, finished=True)]), answers(True))
    with pytest.raises(PartFailedError, match="no device trained in round 2: see the logs of agx-orin-0, orin-nx-0"):
        wait(RecordedView([run(one_failed, all_failed, finished=True)]), answers(True))


def test_a_simulation_fails_if_too_few_rounds_have_an_observation() -> None:
    def simulated(*rounds: view_pb2.RoundView) -> None:
        view: Any = RecordedView([run(*rounds, finished=True)])
        await_run(view, "7", answers(True), 60.0, 0.0, check=require_observed)

    observed = ended_round(1, observations=[view_pb2.DeviceObservation(device_id="agx-orin-0")])
    # The second round was spent measuring modes, so there was nothing left to observe.
    simulated(observed, ended_round(2))
    with pytest.raises(PartFailedError, match="no device's training was observed in rounds 2–3"):
        simulated(observed, ended_round(2), ended_round(3))
    with pytest.raises(PartFailedError, match="no device trained in round 2"):
        simulated(observed, ended_round(2, failed=["agx-orin-0", "orin-nx-0"]))


def test_the_rounds_wait_for_the_whole_fleet() -> None:
    def fleet(*states: session_pb2.DeviceState.ValueType) -> list[view_pb2.DeviceView]:
        return [view_pb2.DeviceView(device_id=f"orin-nx-{k}", state=state) for k, state in enumerate(states)]

    view = RecordedView(fleets=[fleet(), fleet(READY), fleet(READY, PROFILING), fleet(READY, READY)])
    await_ready(view, 2, 60.0, 0.0)  # type: ignore[arg-type]
    assert view.devices() == fleet(READY, READY)

    with pytest.raises(NotInTimeError, match="orin-nx-1 profiling"):
        await_ready(RecordedView(fleets=[fleet(READY, PROFILING)]), 2, 0.0, 0.0)  # type: ignore[arg-type]


def test_a_wait_says_for_whom_and_ends_without_them(
    rounds_script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = rounds_script["await_devices"].__globals__
    monkeypatch.setitem(names, "POLL_S", 0.0)
    offline = view_pb2.DeviceView(device_id="orin-nx-1", state=session_pb2.DEVICE_STATE_OFFLINE)
    ready = view_pb2.DeviceView(device_id="orin-nx-0", state=READY)
    waits = "ready; waiting up to 0 s for the others"
    rounds_script["await_devices"](RecordedView(fleets=[[], [ready], [ready], [ready, offline]]), 3, 0.05)
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"0 of 3 devices are {waits}: 3 not enrolled",
        f"1 of 3 devices are {waits}: 2 not enrolled",
        f"1 of 3 devices are {waits}: orin-nx-1 offline, 1 not enrolled",
        "not all of 3 devices were ready within 0.05 s: orin-nx-1 offline, 1 not enrolled. The run starts with 1 of"
        " them; the others join when they are ready",
    ]
    monkeypatch.setitem(names, "REPEATED_AFTER_S", 0.0)
    rounds_script["await_devices"](RecordedView(fleets=[[ready, offline], [ready, offline], [ready, ready]]), 2, 60.0)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 3 and told[0] == told[1].replace("59 s", "60 s") and told[2] == "all 2 devices are ready"
    with pytest.raises(NotInTimeError, match="orin-nx-1 offline"):
        rounds_script["await_devices"](RecordedView(fleets=[[offline]]), 1, 0.0)


def test_a_run_that_does_not_end_is_given_up() -> None:
    with pytest.raises(NotInTimeError, match="the Flower run did not end within 0 s"):
        await_run(RecordedView([run()]), "7", answers(), 0.0, 0.0)  # type: ignore[arg-type]
