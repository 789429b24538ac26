"""The ServerApp: records when each round's messages were sent, and when it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from wattfleet.flower import PowerAware

app = ServerApp()


class NotingFedAvg(FedAvg):
    """Writes a JSON line for each round when its replies are aggregated."""

    def __init__(self, log: Path, **options: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **options)
        self._log = log
        self._sent_s = 0.0

    def configure_train(self, *arguments: Any, **named: Any) -> Iterable[Message]:
        """Record the time."""
        self._sent_s = time.time()
        return super().configure_train(*arguments, **named)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Write the round's line."""
        replies = list(replies)
        line = {
            "round": server_round,
            "sent_s": self._sent_s,
            "closed_s": time.time(),
            "replies": sum(reply.has_content() for reply in replies),
        }
        with self._log.open("a", encoding="utf-8") as log:
            print(json.dumps(line), file=log)
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    strategy = NotingFedAvg(Path(str(config["log"])), min_available_nodes=int(config["devices"]), min_train_nodes=1)
    PowerAware(
        strategy,
        coordinator=str(config["coordinator"]),
        workload="faults",
        allowance_s=float(config["allowance-s"]),
        patience_s=60.0,
        survey_s=None,
        measures_left_out=False,
    ).start(grid, ArrayRecord([np.zeros(4, dtype=np.float32)]), num_rounds=int(config["rounds"]), timeout=120)
