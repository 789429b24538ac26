"""Boards that answer simulated requests beside federated rounds, with a real coordinator and real agents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import PolicySettings
from tests.fakes.fitting_here import fitting_here, keep_duty_here
from tests.fakes.fleet_in_process import InProcessGrid, running_fleet
from tests.fakes.polling import until
from wattfleet_flower import PowerAware, power_mode_mod, profiled
from wattfleet_proto.convert import kept_duty_from_message
from wattfleet_simulation.report import duties_of
from wattfleet_simulation.settings import SimulatedDevice

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
    simulated = SimulatedDevice(BOARD, "simulated:orin-nano", 0, 0, DUTY)
    duty = duties_of([simulated], {BOARD: tmp_path / BOARD}, [])[BOARD]
    assert duty["in_time_share"] >= 0.95
    assert duty["minibatches"] == ROUNDS * LENGTH
    assert [span["is_training"] for span in duty["spans"]].count(True) == ROUNDS
    assert duty["beside_training"]["p95_ms"] > duty["at_rest"]["p95_ms"]
