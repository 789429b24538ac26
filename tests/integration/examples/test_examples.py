"""The examples: choosing a mode, a custom policy, the quickstarts, and an inference server beside a Flower app."""

from __future__ import annotations

import ast
import difflib
import importlib
import logging
import random
import re
import runpy
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import grpc
import httpx
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

import wattfleet.core
from coordinator.server import policy_of
from coordinator.settings import PolicySettings
from edge_agent.devices.virtual.simulated import SimulatedDevice
from tests.fakes.duties import duty, duty_agent_at
from tests.fakes.fleet_in_process import GRID_RUN_ID, InProcessGrid
from tests.fakes.fleets import front
from tests.fakes.polling import until
from tests.fakes.short_forms import first
from wattfleet.common.identity.channels import Endpoint
from wattfleet.core.budgets import Supplies, Supply
from wattfleet.core.modes import modes_to_array
from wattfleet.core.planning import SITE, Allowance, Offer, plan_round
from wattfleet.core.planning.policies import POLICIES, policy_names
from wattfleet.flower.server import planning_client
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.names import CURRENT_SOCKET

# --- Choose a mode ----------------------------------------------------------------------------------------------------
# The ten-line example of the core: from a CSV file to a mode under a budget.


CHOOSE_A_MODE = Path(__file__).resolve().parents[3] / "examples" / "choose_a_mode.py"
BUDGET_MW = 15_000


@cache
def results() -> dict[str, Any]:
    """The variables of the example after it has run."""
    return runpy.run_path(str(CHOOSE_A_MODE))


def test_the_example_has_ten_lines_besides_its_imports() -> None:
    statements = ast.parse(CHOOSE_A_MODE.read_text()).body
    assert len([node for node in statements[1:] if not isinstance(node, (ast.Import, ast.ImportFrom))]) == 10


def test_the_example_prints_the_front_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(CHOOSE_A_MODE))
    front, choice = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"front: \d{2} modes, \d+ to \d+ s per epoch", front)
    assert re.fullmatch(r"under 15 W: \dc \d\.\d\d/0\.\d\d/\d\.\d\d, \d{3} ms per minibatch, 1[34]\.\d W", choice)


def test_the_chosen_mode_keeps_the_budget_and_is_nearly_the_fastest() -> None:
    # The file was measured on this simulated board, whose noiseless values are known.
    board, modes, choice = SimulatedDevice("orin-nano", 0), results()["modes"], results()["choice"]
    (chosen_ms,), (chosen_mw,) = board.truth(modes_to_array([choice.mode]))
    assert chosen_mw <= BUDGET_MW
    minibatch_ms, power_mw = board.truth(modes)
    best_ms = minibatch_ms[power_mw <= BUDGET_MW].min()
    assert best_ms <= chosen_ms <= 1.25 * best_ms


def test_the_file_holds_what_the_simulated_board_does() -> None:
    measured = results()["measured"]
    minibatch_ms, power_mw = SimulatedDevice("orin-nano", 0).truth(measured.modes)
    assert len(measured) == 12
    assert measured.minibatch_ms == pytest.approx(minibatch_ms, rel=0.15)
    assert measured.power_mw == pytest.approx(power_mw, rel=0.05)


def test_the_package_shows_the_same_lines() -> None:
    source = CHOOSE_A_MODE.read_text()
    shown = dedent((wattfleet.core.__doc__ or "").partition("::\n\n")[2]).strip().splitlines()
    lines = [line for line in shown if line and not line.startswith("...")]
    assert len(lines) >= 10
    for line in lines:
        assert line in source.splitlines() or "measured.csv" in line


# --- Own policy -------------------------------------------------------------------------------------------------------
# The example of a custom policy: installed as a package, and used by a coordinator by its name.

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN_POLICY = Path(__file__).resolve().parents[3] / "examples" / "own_policy"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as pip installs it: its module on the path, its entry points in its metadata."""
    project = tomllib.loads((OWN_POLICY / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(OWN_POLICY))
    yield
    sys.modules.pop("least_energy", None)


def test_the_coordinator_selects_by_the_installed_policy(installed: None) -> None:
    assert policy_names() == (*POLICIES, "least-energy")
    policy = policy_of(PolicySettings(name="least-energy", clients=2))
    offers = [
        Offer("hungry", front((10.0, 60.0)), 2.0),
        Offer("thrifty", front((30.0, 8.0)), 2.0),
        Offer("between", front((15.0, 30.0), (20.0, 20.0)), 2.0),
    ]
    plan = plan_round(offers, policy, Allowance(Supplies((Supply(SITE, None),)), {SITE: 200.0}, {}), 1.0, 1)
    reasons = {decision.device_id: (decision.selected, decision.reason) for decision in plan.decisions}
    assert [device for device, (selected, _) in reasons.items() if selected] == ["between", "thrifty"]
    assert reasons["thrifty"][1].startswith("selected: among the 2 devices with the least energy for an epoch")
    assert "needs 0.60 kJ for an epoch, more than those selected" in reasons["hungry"][1]


# --- Quickstart -------------------------------------------------------------------------------------------------------
# The quickstarts: two or three lines differ, and without a coordinator the training result is the same.

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
QUICKSTARTS = [EXAMPLES / "quickstart-pytorch", EXAMPLES / "quickstart-sklearn"]

each_quickstart = pytest.mark.parametrize("quickstart", QUICKSTARTS, ids=lambda folder: folder.name)


def files(app: Path) -> dict[str, str]:
    kept = [path for path in app.rglob("*") if path.suffix in (".py", ".toml")]
    return {str(path.relative_to(app)): path.read_text() for path in sorted(kept)}


WRAPPED = {  # only a loader that is not a PyTorch DataLoader
    "quickstart-pytorch": [],
    "quickstart-sklearn": [
        "-         for images, labels in batches:",
        "+         for images, labels in until_deadline(profiled(batches)):",
    ],
}


@each_quickstart
def test_two_lines_or_three_are_the_difference_with_what_they_import(quickstart: Path) -> None:
    plain, power_aware = files(quickstart / "plain"), files(quickstart / "power_aware")
    assert list(plain) == list(power_aware)
    changed = [
        line
        for name in plain
        for line in difflib.ndiff(plain[name].splitlines(), power_aware[name].splitlines())
        if line[0] in "+-" and line[1:].strip()
    ]
    lines = [line for line in changed if "import " not in line and "wattfleet[" not in line]
    wrapped = WRAPPED[quickstart.name]
    assert lines == [
        "- app = ClientApp()",
        "+ app = ClientApp(mods=[power_mode_mod])",
        "-     strategy = FedAvg(fraction_evaluate=0.5)",
        "+     strategy = PowerAware(FedAvg(fraction_evaluate=0.5))",
        *wrapped,
    ]
    assert sorted(set(changed) - set(lines)) == [
        '+   "wattfleet[flower]",',
        "+ from wattfleet.flower import PowerAware",
        "+ from wattfleet.flower import power_mode_mod",
        *(["+ from wattfleet.flower import profiled, until_deadline"] if wrapped else []),
    ]
    readme = (quickstart / "README.md").read_text()
    assert all(line[0] + line[2:] in readme for line in lines), "the README shows them"


def accuracies(app: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The accuracy on the server after every round, for an app whose nodes run in this process."""
    package = app.parent.name.replace("-", "_")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(app))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            patch.delitem(sys.modules, name)
        client = importlib.import_module(f"{package}.client_app")
        server = importlib.import_module(f"{package}.server_app")
        config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        nodes = {2**63 + k: {"device-id": f"device-{k}", "partition-id": k, "num-partitions": 3} for k in range(3)}
        grid = InProcessGrid(client.app, nodes, config)
        seen: list[float] = []
        evaluate = server.global_evaluate

        def kept(server_round: int, arrays: Any) -> Any:
            metrics = evaluate(server_round, arrays)
            seen.append(metrics["accuracy"])
            return metrics

        patch.setattr(server, "global_evaluate", kept)
        if hasattr(server, "PowerAware"):
            patch.setattr(server, "PowerAware", partial(server.PowerAware, on_coordinator_away="unplanned"))
        random.seed(0)
        torch.manual_seed(0)
        context = Context(run_id=GRID_RUN_ID, node_id=1, node_config={}, state=RecordDict(), run_config=dict(config))
        server.main(grid, context)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        return seen


@pytest.mark.parametrize("quickstart", first(1, QUICKSTARTS), ids=lambda folder: folder.name)
def test_without_a_coordinator_both_learn_the_same(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The default address must be unreachable, even if a coordinator runs on this machine.
    nobody = grpc.insecure_channel("127.0.0.1:1")
    monkeypatch.setattr(Endpoint, "channel", lambda endpoint: nobody)
    monkeypatch.setattr("wattfleet.flower.server.rounds._FINAL_REPORTS_WITHIN_S", 0.0)
    monkeypatch.setattr(planning_client, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(planning_client, "_RECONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    plain = accuracies(quickstart / "plain", monkeypatch)
    assert "NO BUDGET IS KEPT" not in caplog.text
    power_aware = accuracies(quickstart / "power_aware", monkeypatch)
    assert "NO BUDGET IS KEPT" in caplog.text
    assert plain == power_aware
    assert len(plain) == 4 and plain[-1] > 0.8 > plain[0]
    nobody.close()


# --- Duty HTTP --------------------------------------------------------------------------------------------------------
# The example of an inference server and a Flower app on one device, over real HTTP.

DUTY_HTTP = Path(__file__).resolve().parents[3] / "examples" / "duty-http"
BLACK = [[[0.0] * 8] * 8]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(DUTY_HTTP))
    monkeypatch.syspath_prepend(str(DUTY_HTTP / "federated"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("duty_http", "inference_server")]:
        del sys.modules[name]


def test_images_are_answered_over_http_while_the_app_trains(modules, tmp_path, monkeypatch):
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    with duty_agent_at(tmp_path / "agent.sock", duty(latency_ms=500)) as agent:
        monkeypatch.setenv("AGENT_SOCKET", agent.socket)
        server_module = importlib.import_module("inference_server")
        client_module = importlib.import_module("duty_http.client_app")
        config = uvicorn.Config(server_module.app, port=0, log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            training = threading.Thread(target=_train, args=(client_module, agent.socket))
            training.start()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client, ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: client.post("/classify", json=BLACK), range(40)))
                wrong = client.post("/classify", json=[1.0, 2.0])
                no_image = client.post("/classify", content="{}")
            training.join(60)
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.json()["class"] for answer in answers}) == 1
            assert wrong.status_code == 400 and "this server answers (1, 8, 8)" in wrong.json()["error"]
            assert no_image.status_code == 400
            until(lambda: agent.turns.kept_duty().requests == 41)
            assert agent.turns.kept_duty().missed <= 2
            assert agent.turns.kept_duty().training_share > 0
        finally:
            server.should_exit = True
            thread.join(10)


def _message(client_module) -> tuple[Message, Context]:
    be_task(run_id=7, node_id=1)
    arrays = ArrayRecord(client_module.new_network().state_dict())
    message = Message(RecordDict({"arrays": arrays}), dst_node_id=5, message_type="train")
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={"local-epochs": 1})
    return message, context


def _train(client_module, socket: str) -> None:
    CURRENT_SOCKET.set(socket)  # as the mod does while an app trains
    message, context = _message(client_module)
    client_module.app(message, context)
