"""The ServerApp. Wattfleet's part is the wrapper around the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from flwr.app import ArrayRecord, Context, MetricRecord, UserConfigValue
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from wattfleet.core.planning import EpochChoice
from wattfleet.flower import BatchChoice, PowerAware
from wattfleet.simulation.digits_app.task import NETWORKS, evaluate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train over the fleet, and evaluate the global model on the server after every round."""
    config = context.run_config
    torch.manual_seed(int(config["seed"]))
    network = NETWORKS[str(config["network"])]()
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=int(config["devices"]))
    strategy = PowerAware(
        strategy,
        coordinator=str(config["coordinator"]),
        local_epochs=_epochs(config),
        batches=_batches(str(config["batches"]), int(config["batch-size"])),
        energy_budget=str(config["energy-budget"]) or None,
        # The plan's seconds are those of the simulated boards, not those that this machine needs for the trainings.
        allowance_s=None,
        # The devices are ready before the run begins and their budget is constant, so only nodes are waited for.
        patience_s=float(config["patience-s"]),
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network.state_dict()),
        num_rounds=int(config["rounds"]),
        evaluate_fn=partial(_evaluated, network, str(config["data-file"])),
    )


def _batches(listed: str, batch_size: int) -> BatchChoice | None:
    """The batch sizes that the plan may choose; None if there is only one."""
    return BatchChoice(map(int, listed.split(",")), base_batch=batch_size) if listed else None


def _epochs(config: Mapping[str, UserConfigValue]) -> float | EpochChoice:
    """The number of local epochs, or the numbers that the plan may choose."""
    if not config["epoch-choice"]:
        return float(config["local-epochs"])
    return EpochChoice.of(map(int, str(config["epoch-choice"]).split(",")), is_per_device=bool(config["own-epochs"]))


def _evaluated(network: nn.Module, data_file: str, server_round: int, arrays: ArrayRecord) -> MetricRecord:
    network.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = evaluate(network, data_file)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
