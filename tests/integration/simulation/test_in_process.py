"""The whole path from reference to report, in seconds: everything is real except the boards and the SuperLink."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian
from prometheus_client.parser import text_string_to_metric_families

from coordinator.cli.client import CoordinatorClient
from coordinator.settings import PolicySettings
from edge_agent.devices.virtual.simulated import DatedWork, SpanFile
from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE, WORK_FILE
from edge_agent.profiling.known_workload import BUILT_IN
from edge_agent.profiling.stored_profile import folder_name
from tests.fakes.agent_settings import only_workload
from tests.fakes.fittings import fitting_here, fitting_once, keep_duty_here
from tests.fakes.fleet_in_process import InProcessGrid, RunningFleet, running_fleet
from tests.fakes.polling import until
from wattfleet.common.identity.channels import Endpoint
from wattfleet.core.prediction import read_artefact, restore_predictor
from wattfleet.flower import PlanningError, PowerAware, power_mode_mod, profiled
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.digits_app.client_app import app as client_app
from wattfleet.simulation.digits_app.task import DigitsNet, evaluate
from wattfleet.simulation.report import duties_of
from wattfleet_proto.convert import front_from_message, kept_duty_from_message, mode_from_message
from wattfleet_proto.v1 import planning_pb2, view_pb2

FLEET = {"agx-orin-0": "simulated:agx-orin", "orin-nano-0": "simulated:orin-nano", "xavier-0": "simulated:xavier-agx"}
CONFIG = {
    "devices": 3,
    "seed": 0,
    "local-epochs": 1,
    "learning-rate": 0.05,
    "data-file": "",
    "network": "convolutional",
    "batch-size": 16,
}


@pytest.fixture(scope="module")
def profiled_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of every agent after a first start, in which it measured its board."""
    folder = tmp_path_factory.mktemp("profiled")
    everyone = PolicySettings(name="all")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_once)
        with running_fleet(folder, FLEET, policy=everyone, site_budget_w=200.0, minibatches_per_epoch=None):
            pass
    return folder


@pytest.fixture
def folder(tmp_path: Path, profiled_devices: Path) -> Path:
    """A folder for the test, with the state of agents that have measured their boards."""
    for device_id in FLEET:
        shutil.copytree(profiled_devices / device_id, tmp_path / device_id)
    return tmp_path


@pytest.fixture
def fits_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictors are fitted without a process for each fit; other tests in this folder use the processes."""
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


@pytest.fixture
def fits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictors are fitted to the first measurements only, for tests in which no prediction matters."""
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_once)


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo's epochs are long enough to measure modes in; these boards have measured theirs before.
    monkeypatch.setattr("wattfleet.simulation.digits_app.task._SHIFTS_PER_EPOCH", 4)


def _evaluated(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    network = DigitsNet()
    network.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = evaluate(network)
    return MetricRecord({"loss": loss, "accuracy": accuracy})


def _train(fleet: RunningFleet, grid: InProcessGrid, rounds: int, strategy: PowerAware | None = None) -> None:
    # All nodes and devices are connected and have measured what is trained, so there is nothing to wait for.
    strategy = strategy or PowerAware(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=3),
        fleet.addresses.address,
        workload=BUILT_IN,
        patience_s=0.5,
        survey_s=None,
        measures_left_out=False,
    )
    initial = ArrayRecord(DigitsNet().state_dict())
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=_evaluated)


def _has_length(device: view_pb2.DeviceView) -> bool:
    return any(each.HasField("minibatches_per_epoch") for each in device.workloads)


@pytest.mark.slow
def test_a_node_with_the_socket_of_another_device_is_left_out_of_the_round(folder: Path, fits_once: None) -> None:
    everyone = PolicySettings(name="all")
    with running_fleet(folder, FLEET, policy=everyone, site_budget_w=200.0, minibatches_per_epoch=None) as fleet:
        nodes = fleet.nodes()
        wrong = next(number for number, config in nodes.items() if config["device-id"] == "xavier-0")
        nodes[wrong]["agent-socket"] = str(fleet.socket("orin-nano-0"))
        grid = InProcessGrid(client_app, nodes, CONFIG)
        _train(fleet, grid, rounds=1)
        [planned] = fleet.newest_run().rounds
        assert {each.device_id for each in planned.plan.assignments} == {"agx-orin-0", "orin-nano-0"}
        assert not planned.failed
        [left_out] = [each for each in planned.plan.decisions if not each.selected]
        assert left_out.device_id == "xavier-0" and "belongs to orin-nano-0" in left_out.reason


def test_rounds_hold_the_watts_and_train(folder: Path, fits_in_this_process: None) -> None:
    fastest = PolicySettings(name="fastest-k", clients=2)
    with running_fleet(folder, FLEET, policy=fastest, site_budget_w=75.0, minibatches_per_epoch=None) as fleet:
        grid = InProcessGrid(client_app, fleet.nodes(), CONFIG)
        _train(fleet, grid, rounds=2)
        until(lambda: all(r.HasField("observed_site_w") for r in fleet.newest_run().rounds))
        run = fleet.newest_run()
        trained = {a.device_id for one in run.rounds for a in one.plan.assignments}
        until(lambda: trained <= {each.device_id for each in fleet.view.devices() if _has_length(each)})
        devices = {device.device_id: device for device in fleet.view.devices()}
        with urllib.request.urlopen(f"http://{fleet.addresses.http_address}/metrics") as response:
            samples = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(response.read().decode())
                for sample in family.samples
            }

        assert run.run.finished and not run.run.error
        assert len(run.rounds) == 2
        assert run.rounds[-1].metrics["accuracy"] > run.run.initial_metrics["accuracy"]
        for one in run.rounds:
            assert len(one.plan.assignments) == 2
            assert one.observed_site_w <= 75.0
            assert {decision.device_id for decision in one.plan.decisions} == set(FLEET)
            for seen in one.observations:
                predicted = next(a for a in one.plan.assignments if a.device_id == seen.device_id)
                # The epoch length of the first round may be reported after the second round is planned.
                assert predicted.length_assumed or one.round == 2
                if not predicted.length_assumed:
                    assert seen.epoch_s == pytest.approx(predicted.epoch_s, rel=0.5)
                assert seen.power_w == pytest.approx(predicted.power_w, rel=0.3)
        # The Xavier and the Nano are several times slower than the Orin; the plan uses the faster of the two. At first,
        # all devices were planned with the same assumed length.
        fastest_s = {
            device_id: view.front.points[0].epoch_s / (view.workloads[0].minibatches_per_epoch or 100)
            for device_id, view in devices.items()
        }
        slowest = max(fastest_s, key=fastest_s.__getitem__)
        assert slowest not in {a.device_id for a in run.rounds[0].plan.assignments}
        assert samples["wattfleet_site_power_watts", "allowed"] == 75.0
        assert samples["wattfleet_rounds_planned_total",] == 2
        assert ("wattfleet_round_accuracy",) not in samples, "gauges of a run end with it"

        # The boards' work is on record: nothing but the trainings of the rounds, with what they drew.
        for device_id in FLEET:
            work = list(SpanFile(folder / device_id / WORK_FILE, DatedWork).read())
            trained_work = [span for span in work if span.ended_unix_s > run.rounds[0].planned_unix_s]
            assert [span.mode for span in trained_work] == [
                mode_from_message(each.mode)
                for one in run.rounds
                for each in one.plan.assignments
                if each.device_id == device_id
            ]
            for span in trained_work:
                assert devices[device_id].idle_w < span.energy_j / (span.end_s - span.begin_s) <= 75.0

        # Nodes are asked for their device once; afterwards only the selected ones receive messages of a round.
        identified = [message for message in grid.sent if "arrays" not in message.content]
        assert len(identified) == 3
        assert len(grid.sent) == 3 + 2 * 2

        # The reported front is that of the predictor that the device keeps.
        agx_orin = devices["agx-orin-0"]
        front = front_from_message(agx_orin.front)
        kept = restore_predictor(read_artefact(only_workload(folder / "agx-orin-0") / PREDICTOR_DIRECTORY)).predict(
            front.modes
        )
        (known,) = agx_orin.workloads
        assert kept.minibatch_ms * known.minibatches_per_epoch / 1e3 == pytest.approx(front.epoch_s)


@pytest.mark.slow
def test_another_strategy_and_a_broken_node(folder: Path, fits_once: None) -> None:
    with running_fleet(folder, FLEET, policy=PolicySettings(name="all"), site_budget_w=200.0) as fleet:
        grid = InProcessGrid(client_app, fleet.nodes(), CONFIG)
        median = FedMedian(fraction_evaluate=0.0, min_available_nodes=3)
        strategy = PowerAware(
            median, fleet.addresses.address, workload=BUILT_IN, survey_s=None, measures_left_out=False
        )
        _train(fleet, grid, 1, strategy)
        lost = fleet.nodes().keys() - {min(fleet.nodes())}
        grid.broken = {max(lost)}
        _continue(fleet, grid, strategy)
        second = fleet.newest_run().rounds[-1]
        assert [*second.failed] == [fleet.nodes()[max(lost)]["device-id"]]
        assert not second.HasField("observed_site_w")
        assert strategy.strategy.min_train_nodes == 2, "the wrapped strategy is left as it was"


def _continue(fleet: RunningFleet, grid: InProcessGrid, strategy: PowerAware) -> None:
    """One more round, driven by hand as Flower's own loop does it."""
    arrays = ArrayRecord(DigitsNet().state_dict())
    replies = grid.send_and_receive(strategy.configure_train(2, arrays, ConfigRecord(), grid))
    strategy.aggregate_train(2, replies)


def test_too_few_watts_end_the_run_with_the_reason(folder: Path, fits_once: None) -> None:
    with running_fleet(folder, FLEET, policy=PolicySettings(name="all"), site_budget_w=20.0) as fleet:
        grid = InProcessGrid(client_app, fleet.nodes(), CONFIG)
        with pytest.raises(PlanningError, match="allow at least"):
            _train(fleet, grid, rounds=1)
        run = fleet.newest_run()
        assert run.run.finished and "allow at least" in run.run.error


def test_a_restart_measures_nothing_anew_and_plans_the_same(tmp_path: Path, fits_in_this_process: None) -> None:
    fleet_of_one = {"agx-orin-0": "simulated:agx-orin"}
    fronts = []
    for _ in range(2):
        with running_fleet(tmp_path, fleet_of_one, policy=PolicySettings(name="all"), site_budget_w=200.0) as fleet:
            fronts.append(fleet.view.devices()[0].front)
        lines = (only_workload(tmp_path / "agx-orin-0") / "profile.jsonl").read_text().splitlines()
        assert len(lines) == 1 + 12
    assert fronts[0] == fronts[1]


# --- Workloads in process ---------------------------------------------------------------------------------------------
# Apps of several networks on the same boards, with a real coordinator and real agents; no network is configured.

TWO_BOARDS = {"agx-orin-0": "simulated:agx-orin", "orin-nano-0": "simulated:orin-nano"}
LENGTHS = (700, 450)
MODES = 8
BUDGET_W = 45.0
RUN_A, RUN_B, RUN_AGAIN = 101, 102, 103


@dataclass(frozen=True)
class Loader:
    """A data loader as in an app."""

    minibatches: int
    batch_size: int
    num_workers: int = 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.minibatches))

    def __len__(self) -> int:
        return self.minibatches


def app_of(loader_of: Callable[[int], Loader]) -> ClientApp:
    """An app that trains one epoch of a device's own loader, with two lines more than without Wattfleet."""
    app = ClientApp(mods=[power_mode_mod])

    @app.train()
    def train_app(message: Message, context: Context) -> Message:
        loader = loader_of(int(context.node_config["partition-id"]))
        for _ in profiled(loader):
            pass
        metrics = MetricRecord({"num-examples": loader.minibatches * loader.batch_size})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    return app


VISION = app_of(lambda device: Loader(LENGTHS[device], 16))
TEXT = app_of(lambda device: Loader(LENGTHS[-1 - device], 32))


def train_app(
    fleet: RunningFleet, app: ClientApp, workload: str, parameters: int, rounds: int, run_id: int
) -> list[view_pb2.RoundView]:
    """Run an app, and return its rounds once their observations have arrived."""
    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=len(TWO_BOARDS)),
        fleet.addresses.address,
        workload=workload,
        patience_s=20.0,
        survey_s=None,
        measures_left_out=False,
    )
    initial = ArrayRecord([np.zeros(parameters, dtype=np.float32)])
    strategy.start(InProcessGrid(app, fleet.nodes(), {}, run_id), initial, num_rounds=rounds)
    return rounds_of(fleet, run_id)


def rounds_of(fleet: RunningFleet, run_id: int) -> list[view_pb2.RoundView]:
    with CoordinatorClient(Endpoint(fleet.addresses.address)) as client:
        (run,) = [run.run_id for run in client.runs() if run.run_id.split("-")[0] == str(run_id)]
        return list(client.rounds(run))


def workloads_of(fleet: RunningFleet) -> Mapping[tuple[str, str], view_pb2.DeviceWorkload]:
    return {
        (device.device_id, known.workload.name): known for device in fleet.view.devices() for known in device.workloads
    }


def errors(rounds: Sequence[view_pb2.RoundView], value: str) -> list[float]:
    """The relative deviation of each observation from the plan."""
    found = []
    for one in rounds:
        planned = {each.device_id: each for each in one.plan.assignments}
        for seen in one.observations:
            found.append(getattr(seen, value) / getattr(planned[seen.device_id], value) - 1)
    return found


def watts_of(parts: Iterable[planning_pb2.Assignment]) -> float:
    return sum(part.power_w for part in parts)


@contextmanager
def fresh_fleet(folder: Path) -> Iterator[RunningFleet]:
    """Agents as a new user installs them: no networks or minibatches are configured, and nothing is measured."""
    with running_fleet(
        folder,
        TWO_BOARDS,
        policy=PolicySettings(name="all"),
        site_budget_w=BUDGET_W,
        profile_modes=MODES,
        modes_first=None,
        minibatches_per_epoch=None,
    ) as fleet:
        assert not workloads_of(fleet)
        yield fleet


def require_learned(fleet: RunningFleet, rounds: Sequence[view_pb2.RoundView], lengths: Sequence[int]) -> None:
    """Check that the rounds of a workload learn what was unknown before the first of them."""
    first = rounds[0].plan.assignments
    assert [(part.profiled_modes, part.length_assumed) for part in first] == [(0, True)] * len(TWO_BOARDS)
    assert [part.length_assumed for part in rounds[1].plan.assignments] == [False] * len(TWO_BOARDS)
    # The slowest device of a round measures no more than it has to.
    assert {part.profiled_modes for part in rounds[-1].plan.assignments} <= set(range(5, MODES + 1))
    for one in rounds:
        assert not one.failed
        assert watts_of(one.plan.assignments) <= BUDGET_W
        assert one.observed_site_w <= BUDGET_W
    known = workloads_of(fleet)
    of_devices = [known[device, rounds[0].workload].minibatches_per_epoch for device in TWO_BOARDS]
    assert of_devices == list(lengths)
    settled = rounds[-3:]
    assert any(one.observations for one in settled), "trainings that measure modes are not always observed"
    # How many measurements are done by then depends on how busy the machine is; 5 % is usual.
    assert float(np.median(np.abs(errors(settled, "epoch_s")))) <= 0.1
    assert float(np.median(np.abs(errors(settled, "power_w")))) <= 0.1


# The short forms are the next test, and `test_devices_learn_any_workloads_and_plans_use_them` of `tests/worlds`.
@pytest.mark.slow
@pytest.mark.usefixtures("fits_in_this_process")
def test_a_second_network_trains_on_the_same_boards_without_another_installation(tmp_path: Path) -> None:
    with fresh_fleet(tmp_path) as fleet:
        require_learned(fleet, train_app(fleet, VISION, "vision", 1_000_000, 6, RUN_A), LENGTHS)
        journals = {
            device: tmp_path / device / "workloads" / folder_name("vision") / PROFILE_FILE for device in TWO_BOARDS
        }
        before = {device: journal.read_bytes() for device, journal in journals.items()}
        require_learned(fleet, train_app(fleet, TEXT, "text", 20_000_000, 6, RUN_B), LENGTHS[::-1])
        assert {device: journal.read_bytes() for device, journal in journals.items()} == before
        # For the first network, nothing has to be learned again.
        again = train_app(fleet, VISION, "vision", 1_000_000, 1, RUN_AGAIN)
        assert min(part.profiled_modes for part in again[0].plan.assignments) >= 5
        assert max(map(abs, errors(again, "epoch_s"))) <= 0.15


@pytest.mark.usefixtures("fits_in_this_process")
@pytest.mark.slow
def test_two_networks_share_the_boards_at_the_same_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fresh_fleet(tmp_path) as fleet, ThreadPoolExecutor(2) as pool:
        vision = pool.submit(train_app, fleet, VISION, "vision", 1_000_000, 3, RUN_A)
        text = pool.submit(train_app, fleet, TEXT, "text", 20_000_000, 3, RUN_B)
        both = [*vision.result(), *text.result()]
        assert [one.workload for one in both] == ["vision"] * 3 + ["text"] * 3
        assert not any(one.failed for one in both), "no device trains two networks at once"
        # Which devices each run gets depends on how long the other run's rounds take.
        trained = {(part.device_id, one.workload) for one in both for part in one.plan.assignments}
        lengths = {
            "vision": dict(zip(TWO_BOARDS, LENGTHS, strict=True)),
            "text": dict(zip(TWO_BOARDS, LENGTHS[::-1], strict=True)),
        }
        true = {(device, workload): lengths[workload][device] for device, workload in trained}
        until(lambda: true.items() <= {k: v.minibatches_per_epoch for k, v in workloads_of(fleet).items()}.items())
    assert "does not describe a workload" not in caplog.text


# --- Duties in process ------------------------------------------------------------------------------------------------
# Boards that answer simulated requests beside federated rounds, with a real coordinator and real agents.

BOARD = "orin-nano-0"
DUTY = "mobilenetv3:30:1500"
LENGTH, ROUNDS = 400, 2

app = ClientApp(mods=[power_mode_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    for _ in profiled(range(LENGTH)):
        pass
    metrics = MetricRecord({"num-examples": LENGTH})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


def test_rounds_are_trained_beside_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)
    monkeypatch.setattr("edge_agent.runtime.agent.keep_duty_in_process", keep_duty_here)
    everyone = PolicySettings(name="all")
    with running_fleet(
        tmp_path,
        {BOARD: "simulated:orin-nano"},
        policy=everyone,
        site_budget_w=60.0,
        profile_modes=6,
        minibatches_per_epoch=None,
        duty=DUTY,
    ) as fleet:
        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0, min_available_nodes=1),
            fleet.addresses.address,
            workload="vision",
            patience_s=60.0,
            survey_s=None,
            measures_left_out=False,
        )
        grid = InProcessGrid(app, fleet.nodes(), {})
        strategy.start(grid, ArrayRecord([np.zeros(1_000, dtype=np.float32)]), num_rounds=ROUNDS)
        until(lambda: fleet.view.devices()[0].duty.requests > 2_000)
        last, (device,) = fleet.newest_run().rounds[-1], fleet.view.devices()
    # The duty's requests arrive, and its figures are shown in the same place as those of real requests.
    kept = kept_duty_from_message(device.duty)
    assert (kept.workload, kept.latency_ms, kept.servers) == ("mobilenetv3", 1500.0, 1)
    assert kept.missed_share < 0.05
    assert kept.arrivals_per_s == pytest.approx(30, rel=0.5)
    # The round is planned with the duty kept, and takes about as long.
    (planned,), (seen,) = last.plan.assignments, last.observations
    assert not planned.length_assumed
    assert 0.7 < planned.epoch_s / seen.epoch_s < 1.5
    assert seen.power_w < 1.1 * planned.power_w
    simulated = FleetDevice(BOARD, "simulated:orin-nano", 0, 0, DUTY)
    duty = duties_of([simulated], {BOARD: tmp_path / BOARD}, [])[BOARD]
    assert duty["in_time_share"] >= 0.95
    assert duty["minibatches"] == ROUNDS * LENGTH
    assert [span["is_training"] for span in duty["spans"]].count(True) == ROUNDS
    assert duty["beside_training"]["p95_ms"] > duty["at_rest"]["p95_ms"]
