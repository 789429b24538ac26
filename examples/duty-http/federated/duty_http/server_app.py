"""The ServerApp, which runs on the server."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from duty_http.client_app import new_network
from wattfleet.flower import PowerAware

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train over all nodes."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    PowerAware(strategy, local_epochs=int(context.run_config["local-epochs"])).start(
        grid=grid,
        initial_arrays=ArrayRecord(new_network().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
