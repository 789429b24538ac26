"""The simulation agrees with what it stands for: Flower's federated averaging, and measured boards."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from tests.fakes.short_forms import first
from wattfleet.core.modes import BOARDS, Workload, modes_to_array
from wattfleet.core.prediction.roofline import power_mw, settings_of, step_time_ms
from wattfleet.simulation import board_fit
from wattfleet.simulation.baselines import (
    PLAIN_FLOWER,
    PRESETS,
    BaselineTraining,
    Federation,
    Model,
    TrainingStoppedError,
)
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.digits_app.client_app import train_locally
from wattfleet.simulation.digits_app.task import (
    NETWORKS,
    Minibatches,
    device_data,
    evaluate,
    scaled_learning_rate,
    train,
)
from wattfleet.simulation.flower_task import be_task
from wattfleet.simulation.settings import SimulatedApp, SimulationSettings

# --- Federation -------------------------------------------------------------------------------------------------------
# The baselines' federated averaging is that of Flower with the digits app.


APP, DEVICES, SEED = SimulatedApp("perceptron", 16, local_epochs=(1,)), 8, 4
CONFIG = {
    "devices": DEVICES,
    "seed": SEED,
    "local-epochs": 1,
    "learning-rate": 0.05,
    "data-file": "",
    "network": "perceptron",
    "batch-size": 16,
}


@pytest.fixture
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet.simulation.digits_app.task._SHIFTS_PER_EPOCH", 2)


def with_flower(arrays: ArrayRecord, partitions: Sequence[int], server_round: int) -> ArrayRecord:
    """A round of the app's own ClientApp and Flower's FedAvg."""
    be_task(1, 1)
    replies = []
    for partition in partitions:
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": server_round})})
        message = Message(content, dst_node_id=1 + partition, message_type="train")
        context = Context(1, 1 + partition, {"partition-id": partition}, RecordDict(), CONFIG)
        replies.append(train_locally(message, context))
    merged, _ = FedAvg().aggregate_train(server_round, replies)
    assert merged is not None
    return merged


@pytest.mark.usefixtures("short_epochs")
def test_a_round_gives_the_model_that_flower_gives() -> None:
    torch.manual_seed(SEED)
    network = NETWORKS["perceptron"]()
    federation = Federation(APP, DEVICES, SEED)
    model, arrays = federation.start(), ArrayRecord(network.state_dict())
    for server_round, partitions in enumerate(([0, 5], [2, 5, 7]), 1):
        model = federation.after(model, partitions)
        arrays = with_flower(arrays, partitions, server_round)
        network.load_state_dict(arrays.to_torch_state_dict())
        for name, values in network.state_dict().items():
            assert torch.allclose(model.parameters[name], values, atol=1e-5)
        assert model.accuracy == pytest.approx(evaluate(network)[1], abs=0.01)


@pytest.mark.usefixtures("short_epochs")
def test_the_same_choices_are_trained_once_and_training_can_be_stopped() -> None:
    stopped = threading.Event()
    federation = Federation(APP, DEVICES, SEED, stopped=stopped)
    first = federation.after(federation.start(), [1])
    second = federation.after(first, [3, 2])
    stopped.set()
    assert federation.after(first, [2, 3]) is second
    with pytest.raises(TrainingStoppedError):
        federation.after(first, [4])


@pytest.mark.usefixtures("short_epochs")
def test_other_runs_of_a_process_keep_their_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    start: Model = Federation(APP, DEVICES, SEED).start()
    assert torch.equal(torch.rand(1), expected) and start.server_round == 0


def settings_of_apps(*apps: SimulatedApp) -> SimulationSettings:
    return SimulationSettings(
        devices=[
            FleetDevice(device_id, f"simulated:{device_id}", number, number)
            for number, device_id in enumerate(("agx-orin", "orin-nano", "orin-nx"))
        ],
        apps=[(app,) for app in apps],
        rounds=2,
        site_budget_w=60.0,
        profile_modes=5,
        policy="progress",
        clients=None,
        seed=SEED,
        reference="",
        metrics_port=0,
    )


@pytest.fixture(scope="module")
def boards() -> dict[str, VirtualBoard]:
    return {each.device_id: open_virtual_board(each.spec, each.seed) for each in settings_of_apps(APP).devices}


@pytest.mark.usefixtures("short_epochs")
def test_both_baselines_are_trained_while_something_else_goes_on(boards: dict[str, VirtualBoard]) -> None:
    settings = settings_of_apps(APP)
    with BaselineTraining(settings, boards) as baselines:
        assert baselines.are_done
        for _ in range(2):  # a run's workload is known from several polls
            baselines.begin(1, APP, Workload("digits"))
        presets, plain = baselines.results(1)
        assert baselines.are_done
    assert (presets["name"], plain["name"]) == (PRESETS, PLAIN_FLOWER)
    for way in (presets, plain):
        assert [one["round"] for one in way["rounds"]] == [1, 2]
        assert way["initial_accuracy"] == Federation(APP, 3, SEED).start().accuracy
        assert max(one["accuracy"] for one in way["rounds"]) > way["initial_accuracy"]
        idle_w, extra_w = way["watts"]["idle_w"], way["watts"]["training"]
        assert max(idle_w + watts for watts in extra_w) <= 1.01 * settings.site_budget_w
        # The energy of all boards is the area below the site's watts.
        at_s = way["watts"]["at_s"]
        area_j = sum(
            (idle_w + watts) * (end_s - begin_s) for begin_s, end_s, watts in zip(at_s, at_s[1:], extra_w, strict=False)
        )
        assert way["rounds"][-1]["energy_j"] == pytest.approx(area_j, rel=1e-4)
    # The same devices in the same rounds give the same models, whatever their modes are.
    devices = [[one["devices"] for one in way["rounds"]] for way in (presets, plain)]
    if devices[0] == devices[1]:
        assert presets["rounds"][-1]["accuracy"] == plain["rounds"][-1]["accuracy"]


@pytest.mark.usefixtures("short_epochs")
def test_a_baseline_that_fails_costs_no_report(
    boards: dict[str, VirtualBoard], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("wattfleet.simulation.baselines.Federation.after", fails)
    with BaselineTraining(settings_of_apps(APP), boards) as baselines:
        baselines.begin(1, APP, Workload("digits"))
        reasons = [each["reason"] for each in baselines.results(1)]
    assert reasons == ["it failed with RuntimeError('out of luck')"] * 2
    assert "the baselines of run 1 failed" in caplog.text


@pytest.mark.usefixtures("short_epochs")
def test_the_end_of_a_simulation_ends_its_baselines_within_a_minibatch(
    boards: dict[str, VirtualBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet.simulation.digits_app.task._SHIFTS_PER_EPOCH", 3_000)
    begun = threading.Event()
    with BaselineTraining(settings_of_apps(APP), boards) as baselines:
        monkeypatch.setattr("wattfleet.simulation.baselines.evaluate", lambda *_: (begun.set(), (0.0, 0.1))[1])
        baselines.begin(1, APP, Workload("digits"))
        assert begun.wait(60)
    # An epoch would take minutes.
    assert baselines.are_done


# --- Digits app -------------------------------------------------------------------------------------------------------
# The demo's app learns with each of its networks and with any minibatch size.

RATE = 0.05  # the app's own rate, for minibatches of 16


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch_size", first(1, [16, 4]))
def test_a_network_learns_with_small_and_large_minibatches(network: str, batch_size: int) -> None:
    torch.manual_seed(0)
    module = NETWORKS[network]()
    loader = Minibatches(device_data(0, 16, 0), batch_size, 0)
    train(module, [loader], scaled_learning_rate(RATE, batch_size))
    _, accuracy = evaluate(module)
    assert accuracy > 0.4


def test_an_epoch_shows_all_digits_equally_often_and_has_the_length_it_states() -> None:
    images, labels = device_data(0, 16, 0)
    loader = Minibatches((images, labels), 7, 0)
    batches = list(loader)
    assert len(batches) == len(loader)
    shown = torch.cat([labels for _, labels in batches]).bincount(minlength=10)
    own = labels.bincount(minlength=10)
    assert torch.equal(shown, own * (shown.sum() // own.sum()))
    assert all(shifted.shape[1:] == images.shape[1:] for shifted, _ in batches)


@pytest.mark.parametrize(("batch_size", "passes"), [(7, 0.5), (16, 1.25), (32, 2.0)])
def test_an_epoch_of_a_planned_batch_has_as_many_more_samples(batch_size: int, passes: float) -> None:
    data = device_data(0, 16, 0)
    samples = sum(len(labels) for _, labels in Minibatches(data, 16, 0))
    loader = Minibatches(data, batch_size, 0, passes)
    sizes = [len(labels) for _, labels in loader]
    assert sum(sizes) == round(passes * samples)
    assert len(loader) == len(sizes)
    assert set(sizes[:-1]) <= {batch_size}


# --- Board fit --------------------------------------------------------------------------------------------------------


# The short form is the next test.
@pytest.mark.data
@pytest.mark.slow
def test_the_data_file_is_what_the_command_makes_of_the_corpora(corpora):
    lines = []
    assert board_fit.main(["--data", str(corpora), "--check"], lines.append) == 0, lines


def test_a_changed_parameter_or_another_form_of_physics_is_found():
    kept = json.loads(board_fit.TARGET.read_text())
    assert board_fit.differences(kept, kept) == []
    changed = json.loads(board_fit.TARGET.read_text())
    changed["boards"]["orin-nx"]["time"]["compute_mcycles"] *= 1.2
    changed["boards"]["orin-nano"]["power"]["new_term_mw"] = 1.0
    changed["deviation"]["time"][0] = -1.0
    found = board_fit.differences(changed, kept)
    assert [line.split(" is off")[0] for line in found] == [
        "orin-nano: the parameters do not match those of the current physics",
        "orin-nx: time",
        "orin-nx: power",
        "deviation: time differs",
    ]


def test_a_folder_without_the_corpora_is_named(tmp_path):
    lines = []
    assert board_fit.main(["--data", str(tmp_path)], lines.append) == 2
    assert "agx_orin_resnet18.csv: no such file" in lines[0]


# The short form, of the physics in the data file, is `test_a_changed_parameter_or_another_form_of_physics_is_found`.
@pytest.mark.data
@pytest.mark.slow
def test_a_xavier_is_an_orin_with_a_quarter_of_the_cores_at_the_published_power(corpora):
    agx = board_fit.fit_board(board_fit.read_profile(corpora / board_fit.AGX_CORPUS))
    time, power = board_fit.xavier_agx(agx)
    assert time.compute_mcycles == pytest.approx(4 * agx.time.compute_mcycles)
    assert time.traffic_mcycles == agx.time.traffic_mcycles
    maxn = settings_of(modes_to_array([BOARDS["xavier-agx"].space.highest]), None)
    assert power_mw(power, time, maxn)[0] == pytest.approx(36_400)
    # Without the adjustment: 8.47 minutes for 3,125 minibatches.
    assert step_time_ms(time, maxn)[0] == pytest.approx(8.47 * 60e3 / 3125, rel=0.02)
    assert np.abs(np.log(step_time_ms(agx.time, maxn) / step_time_ms(time, maxn)))[0] > 0.5
