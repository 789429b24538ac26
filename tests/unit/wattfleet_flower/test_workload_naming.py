"""The description of a run's workload that the coordinator gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from tests.fakes.flower_in_process import APP, GridOfNodes, PlannerStub
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Task, Workload, WorkloadFacts
from wattfleet_flower import FedBuff, PowerAware
from wattfleet_proto.v1 import power_pb2


def layers(*widths: int, dtype: type = np.float32) -> ArrayRecord:
    """A dense network."""
    return ArrayRecord([np.zeros((m, n), dtype) for m, n in zip(widths, widths[1:], strict=False)])


NETWORK = layers(64, 32, 10)


def told(arrays: ArrayRecord = NETWORK, config: Any = None, strategy: Any = None, **options: Any) -> power_pb2.Workload:
    """The workload that a run states when it starts."""
    planner, grid = PlannerStub(), GridOfNodes({})
    grid.run_config = config or {}
    PowerAware(strategy or FedAvg(), planner, clock=grid.clock, **options).start(grid, arrays, num_rounds=0)
    [started] = planner.asked("StartRun")
    workload: power_pb2.Workload = started.workload
    return workload


def test_a_run_without_a_name_is_named_after_the_app_and_its_network() -> None:
    workload = told()
    app, digest = workload.name.split(" #")
    assert app == APP
    assert len(digest) == 8 and int(digest, 16) >= 0
    assert workload.parameters == 64 * 32 + 32 * 10
    assert workload.task == power_pb2.TASK_TRAINING


def test_the_same_app_with_another_batch_is_the_same_workload() -> None:
    assert told().name == told(config={"batch-size": 64, "learning-rate": 0.1, "num-server-rounds": 7}).name


def test_two_apps_of_one_name_with_other_networks_are_told_apart() -> None:
    networks = [NETWORK, layers(64, 16, 10), layers(64, 32, 10, 10), layers(64, 32, 10, dtype=np.float16)]
    renamed = ArrayRecord({f"layer{name}": array for name, array in NETWORK.items()})
    names = [told(network).name for network in [*networks, renamed]]
    assert len(set(names)) == 5
    assert {name.split(" #")[0] for name in names} == {APP}


def test_weights_do_not_change_the_workload() -> None:
    trained = ArrayRecord([array + 1 for array in NETWORK.to_numpy_ndarrays()])
    assert told(trained).name == told().name


@pytest.mark.parametrize("key", ["model", "image-size", "image_size", "sequence_length", "precision"])
def test_a_run_config_key_that_changes_the_work_makes_another_workload(key: str) -> None:
    first, second = told(config={key: 1}).name, told(config={key: 2}).name
    assert first.startswith(f"{APP} {key.replace('_', '-')}=1 #")
    assert first != second != told().name


def test_the_order_of_the_run_config_does_not_matter() -> None:
    assert told(config={"model": "r", "dataset": "d"}).name == told(config={"dataset": "d", "model": "r"}).name


def test_the_app_may_list_its_own_keys() -> None:
    config = {"depth": 3, "model": "resnet"}
    assert told(config=config, workload_keys=("depth",)).name.startswith(f"{APP} depth=3 #")


def test_the_app_may_name_its_workload() -> None:
    assert told(workload="resnet18-imagenet").name == "resnet18-imagenet"
    stated = told(workload=Workload("bert", WorkloadFacts(batch=32, parameters=110e6, precision="bfloat16")))
    assert (stated.name, stated.batch, stated.parameters, stated.precision) == ("bert", 32, 110e6, "bfloat16")


def test_fedbuff_runs_state_their_workload() -> None:
    assert told(strategy=FedBuff(2)).name == told().name


def test_a_network_without_arrays_states_no_number_of_parameters() -> None:
    assert not told(ArrayRecord()).HasField("parameters")


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("", "1 to 200 printable characters, not ''"),
        ("resnet\x1b[31m", "printable characters, not 'resnet"),
        ("x" * 10_000, "not one of 10,000 characters: give it a shorter or plainer name"),
        (18, "must be a name or a wattfleet.modes.Workload, not 18"),
        (Workload("w", WorkloadFacts(Task.INFERENCE)), "'w' is inference, but a Flower app trains"),
    ],
)
def test_a_workload_that_cannot_be_used_is_refused_at_once(stated: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason.replace("[", r"\[")) as refused:
        told(workload=stated)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("value", ["x" * 10_000, "res\nnet", "\u202e18"])
def test_a_run_config_that_names_no_workload_is_refused_with_the_remedy(value: str) -> None:
    planner, grid = PlannerStub(), GridOfNodes({})
    grid.run_config = {"model": value}
    with pytest.raises(InvalidInputError, match=r"State it in the app: PowerAware\(strategy, workload='...'\)") as no:
        PowerAware(FedAvg(), planner).start(grid, NETWORK)
    assert len(str(no.value)) < 500
    assert planner.calls == [], "nothing was started"
    assert told(config={"model": value}, workload="digits").name == "digits"


def test_a_single_text_as_keys_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"a sequence of keys, such as \('model',\)"):
        told(workload_keys="model")
