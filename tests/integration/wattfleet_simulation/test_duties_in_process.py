"""Boards that answer simulated requests beside federated rounds, with a real coordinator and real agents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import PolicySettings
from edge_agent.paths import SERVED_FILE
from edge_agent.serving.served_spans import SpanFile
from tests.fakes.fleet_in_process import InProcessGrid, running_fleet
from tests.fakes.polling import until
from tests.fakes.running_agent import fitting_here
from wattfleet_flower import PowerAware, power_mode_mod, profiled
from wattfleet_proto.convert import kept_duty_from_message
from wattfleet_simulation.devices import SimulatedDevice
from wattfleet_simulation.report_duties import duties_of

FLEET = {"agx-orin-0": "simulated:agx-orin", "orin-nano-0": "simulated:orin-nano"}
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
    everyone = PolicySettings(name="all")
    with running_fleet(
        tmp_path, FLEET, policy=everyone, site_budget_w=150.0, profile_modes=8, minibatches_per_epoch=LENGTH, duty=DUTY
    ) as fleet:
        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0, min_available_nodes=2),
            fleet.addresses.address,
            workload="vision",
            patience_s=60.0,
        )
        grid = InProcessGrid(app, fleet.nodes(), {})
        strategy.start(grid, ArrayRecord([np.zeros(1_000, dtype=np.float32)]), num_rounds=ROUNDS)
        last = fleet.newest_run().rounds[-1]

        def kept() -> list[int]:
            return [device.duty.requests for device in fleet.view.devices()]

        until(lambda: min(kept()) > 1_000)
        figures = [kept_duty_from_message(device.duty) for device in fleet.view.devices()]
    planned = {each.device_id: each for each in last.plan.assignments}
    for seen in last.observations:
        assert 0.6 < planned[seen.device_id].epoch_s / seen.epoch_s < 1.7
        assert seen.power_w < 1.1 * planned[seen.device_id].power_w
    assert last.observations
    for figure in figures:
        assert (figure.workload, figure.latency_ms, figure.servers) == ("mobilenetv3", 1500.0, 1)
        assert figure.missed_share < 0.05
        assert figure.arrivals_per_s == pytest.approx(30, rel=0.5)
    devices = [SimulatedDevice(device_id, spec, 0, 0, DUTY) for device_id, spec in FLEET.items()]
    found = duties_of(devices, {device_id: tmp_path / device_id for device_id in FLEET}, [])
    trained = {each.node_id for each in last.plan.assignments}
    assert trained
    for device_id, duty in found.items():
        spans = list(SpanFile(tmp_path / device_id / SERVED_FILE).read())
        assert duty["requests"] == sum(len(span.latency_ms) for span in spans)
        assert duty["in_time_share"] >= 0.95
        if device_id in planned:
            assert duty["minibatches"] >= LENGTH
            assert duty["beside_training"]["p95_ms"] > duty["at_rest"]["p50_ms"]
        ends = [span["end_s"] for span in duty["spans"]]
        assert ends == sorted(ends)
