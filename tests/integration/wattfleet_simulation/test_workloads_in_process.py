"""Apps of several networks on the same boards, with a real coordinator and real agents; no network is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from coordinator.cli.client import CoordinatorClient
from coordinator.settings import PolicySettings
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.stored_profile import folder_name
from tests.fakes.fitting_here import fitting_here
from tests.fakes.fleet_in_process import InProcessGrid, RunningFleet, running_fleet
from tests.fakes.polling import until
from wattfleet_flower import PowerAware, power_mode_mod, profiled
from wattfleet_identity.channels import Endpoint
from wattfleet_proto.v1 import planning_pb2, view_pb2

FLEET = {"agx-orin-0": "simulated:agx-orin", "orin-nano-0": "simulated:orin-nano"}
LENGTHS = (700, 450)
MODES = 8
BUDGET_W = 45.0
RUN_A, RUN_B, RUN_AGAIN = 101, 102, 103


@pytest.fixture(autouse=True)
def fits_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.runtime.readiness.fitting_process", fitting_here)


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
    def train(message: Message, context: Context) -> Message:
        loader = loader_of(int(context.node_config["partition-id"]))
        for _ in profiled(loader):
            pass
        metrics = MetricRecord({"num-examples": loader.minibatches * loader.batch_size})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    return app


VISION = app_of(lambda device: Loader(LENGTHS[device], 16))
TEXT = app_of(lambda device: Loader(LENGTHS[-1 - device], 32))


def train(
    fleet: RunningFleet, app: ClientApp, workload: str, parameters: int, rounds: int, run_id: int
) -> list[view_pb2.RoundView]:
    """Run an app, and return its rounds once their observations have arrived."""
    strategy = PowerAware(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=len(FLEET)),
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
        FLEET,
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
    assert [(part.profiled_modes, part.length_assumed) for part in first] == [(0, True)] * len(FLEET)
    assert [part.length_assumed for part in rounds[1].plan.assignments] == [False] * len(FLEET)
    # The slowest device of a round measures no more than it has to.
    assert {part.profiled_modes for part in rounds[-1].plan.assignments} <= set(range(5, MODES + 1))
    for one in rounds:
        assert not one.failed_device_ids
        assert watts_of(one.plan.assignments) <= BUDGET_W
        assert one.observed_site_w <= BUDGET_W
    known = workloads_of(fleet)
    of_devices = [known[device, rounds[0].workload].minibatches_per_epoch for device in FLEET]
    assert of_devices == list(lengths)
    settled = rounds[-3:]
    assert any(one.observations for one in settled), "trainings that measure modes are not always observed"
    # How many measurements are done by then depends on how busy the machine is; 5 % is usual.
    assert float(np.median(np.abs(errors(settled, "epoch_s")))) <= 0.1
    assert float(np.median(np.abs(errors(settled, "power_w")))) <= 0.1


def test_a_second_network_trains_on_the_same_boards_without_another_installation(tmp_path: Path) -> None:
    with fresh_fleet(tmp_path) as fleet:
        require_learned(fleet, train(fleet, VISION, "vision", 1_000_000, 6, RUN_A), LENGTHS)
        journals = {device: tmp_path / device / "workloads" / folder_name("vision") / PROFILE_FILE for device in FLEET}
        before = {device: journal.read_bytes() for device, journal in journals.items()}
        require_learned(fleet, train(fleet, TEXT, "text", 20_000_000, 6, RUN_B), LENGTHS[::-1])
        assert {device: journal.read_bytes() for device, journal in journals.items()} == before
        # For the first network, nothing has to be learned again.
        again = train(fleet, VISION, "vision", 1_000_000, 1, RUN_AGAIN)
        assert min(part.profiled_modes for part in again[0].plan.assignments) >= 5
        assert max(map(abs, errors(again, "epoch_s"))) <= 0.15


def test_two_networks_share_the_boards_at_the_same_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fresh_fleet(tmp_path) as fleet, ThreadPoolExecutor(2) as pool:
        vision = pool.submit(train, fleet, VISION, "vision", 1_000_000, 3, RUN_A)
        text = pool.submit(train, fleet, TEXT, "text", 20_000_000, 3, RUN_B)
        both = [*vision.result(), *text.result()]
        assert [one.workload for one in both] == ["vision"] * 3 + ["text"] * 3
        assert not any(one.failed_device_ids for one in both), "no device trains two networks at once"
        # Which devices each run gets depends on how long the other run's rounds take.
        trained = {(part.device_id, one.workload) for one in both for part in one.plan.assignments}
        lengths = {
            "vision": dict(zip(FLEET, LENGTHS, strict=True)),
            "text": dict(zip(FLEET, LENGTHS[::-1], strict=True)),
        }
        true = {(device, workload): lengths[workload][device] for device, workload in trained}
        until(lambda: true.items() <= {k: v.minibatches_per_epoch for k, v in workloads_of(fleet).items()}.items())
    assert "does not describe a workload" not in caplog.text
