"""A user's own app on Flower's simulation engine, with Ray. `tests/unit/simulation/test_own_app.py` is the short form.

Ray ends if its processes have not started within 15 s, as beside other tests: none of these is part of `make test`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from flwr.app import Context, Message

from wattfleet.flower.server.nodes import identify_request
from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS
from wattfleet.simulation.client_process import SIMULATED_KEY, ClientTask, IsolatedApp
from wattfleet.simulation.comparison import THIS_RUN
from wattfleet.simulation.flower import environment, program
from wattfleet.simulation.flower_task import be_task
from wattfleet.simulation.ray_clients import RayClients
from wattfleet_proto.assignment import DEVICE_ID_KEY, RECORD_KEY

# Ray reads its environment when it is imported, so it must not be imported here.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]

SMALL_APP = Path(__file__).parents[2] / "fixtures" / "small_app"
_WITHIN_S = 600.0


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayClients]:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # another cluster, which is not used
    app = IsolatedApp(str(SMALL_APP), "small_app.client_app:app", str(tmp_path / "clients.log"))
    found = RayClients(app, None)
    yield found
    found.close()


def asked(node_id: int) -> tuple[Message, Context]:
    from flwr.app import RecordDict

    be_task(7, 1)
    message = identify_request(node_id)
    message.content[SIMULATED_KEY] = ClientTask(0).to_record()
    node_config = {"partition-id": node_id, "num-partitions": 9, DEVICE_ID_KEY: f"device-{node_id}"}
    return message, Context(7, node_id, node_config, RecordDict(), {"fails-from": -1, "leaks": True})


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_clients_answer_from_flowers_engine(clients: RayClients) -> None:
    found = {
        place: reply.content[RECORD_KEY][DEVICE_ID_KEY]
        for place, reply, _ in clients.handle(asked(node_id) for node_id in (2, 3, 4, 5))
    }
    assert found == {place: f"device-{place + 2}" for place in range(4)}


def command(out: Path, rounds: int = 3) -> list[str]:
    return [
        *(program("wattfleet"), "simulate", "--app", str(SMALL_APP)),
        *("--devices", "agx-orin:2,orin-nano:4", "--site-budget-w", "0.1kW", "--modes", "12"),
        *("--rounds", str(rounds), "--out", str(out)),
    ]


@pytest.mark.timeout(1800)
def test_an_app_is_compared_in_one_command_that_can_be_interrupted(tmp_path: Path) -> None:
    first = subprocess.Popen(command(tmp_path), env=environment({}), stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if "round 1 of 3" in line:
            break
    first.send_signal(signal.SIGINT)
    rest = first.communicate(timeout=_WITHIN_S)[0]
    assert "the same command goes on after the last whole round" in rest
    changed = subprocess.run(command(tmp_path, 4), env=environment({}), capture_output=True, text=True, check=False)
    assert "rounds was 3, and is 4" in changed.stderr
    done = subprocess.run(command(tmp_path), env=environment({}), capture_output=True, text=True, check=True)
    assert "round 1 of 3 (done before)" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    [run] = report["runs"]
    assert [way["name"] for way in run["comparison"]["ways"]] == [THIS_RUN, PRESETS, PLAIN_FLOWER]
    assert all(way["final_accuracy"] > 0.5 and not way["over_budget_s"] for way in run["comparison"]["ways"])
    assert "No seconds or watts on this page were measured on a Jetson" in (tmp_path / "report.html").read_text()
    time.sleep(1.0)
    assert not [each for each in os.listdir(tmp_path) if each == "resume"]
