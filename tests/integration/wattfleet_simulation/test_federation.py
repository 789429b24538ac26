"""The baselines' federated averaging is that of Flower with the digits app."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_task import be_task
from wattfleet_simulation.digits_app.client_app import train_locally
from wattfleet_simulation.digits_app.task import NETWORKS, evaluate
from wattfleet_simulation.federation import Federation, Model, StoppedError
from wattfleet_simulation.settings import SimulatedApp

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


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet_simulation.digits_app.task._SHIFTS_PER_EPOCH", 2)


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


def test_the_same_choices_are_trained_once_and_training_can_be_stopped() -> None:
    stopped = threading.Event()
    federation = Federation(APP, DEVICES, SEED, stopped=stopped)
    first = federation.after(federation.start(), [1])
    second = federation.after(first, [3, 2])
    stopped.set()
    assert federation.after(first, [2, 3]) is second
    with pytest.raises(StoppedError):
        federation.after(first, [4])


def test_other_runs_of_a_process_keep_their_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    start: Model = Federation(APP, DEVICES, SEED).start()
    assert torch.equal(torch.rand(1), expected) and start.server_round == 0
