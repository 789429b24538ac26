"""The ServerApp, which runs on the server."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart_pytorch.task import Net, load_test_data, test
from wattfleet.flower import PowerAware

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train over the nodes, and test the global network after every round."""
    torch.manual_seed(0)
    strategy = PowerAware(FedAvg(fraction_evaluate=0.5))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=global_evaluate,
    )


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global network on the server."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net, load_test_data(), torch.device("cpu"))
    return MetricRecord({"loss": loss, "accuracy": accuracy})
