"""The ServerApp, which runs on the server."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart_sklearn.task import new_model, set_weights, test, weights_of
from wattfleet.flower import PowerAware

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train over the nodes, and test the global model after every round."""
    strategy = PowerAware(FedAvg(fraction_evaluate=0.5))
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(weights_of(new_model())),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=global_evaluate,
    )


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model on the server."""
    model = new_model()
    set_weights(model, arrays.to_numpy_ndarrays())
    loss, accuracy, _ = test(model)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
