"""The ServerApp: notes when each round's messages are sent, and when it has ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from wattfleet.flower import PowerAware

app = ServerApp()


class NotingFedAvg(FedAvg):
    """Notes when a round's messages are sent, and when its replies are aggregated."""

    def __init__(self, context: Context, **options: Any) -> None:
        super().__init__(fraction_evaluate=0.0, **options)
        self._context = context

    def configure_train(self, server_round: int, *arguments: Any, **named: Any) -> Iterable[Message]:
        """Note that the round is planned."""
        messages = list(super().configure_train(server_round, *arguments, **named))
        self.note("sent", round=server_round, devices=len(messages))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Note that the round has ended."""
        replies = list(replies)
        self.note("closed", round=server_round, replies=sum(reply.has_content() for reply in replies))
        return super().aggregate_train(server_round, replies)

    def note(self, what: str, **values: int) -> None:
        """Write a line."""
        line = {"what": what, "run": str(self._context.run_id), "pid": os.getpid(), "at_s": time.time(), **values}
        with open(str(self._context.run_config["notes"]), "a", encoding="utf-8") as notes:
            print(json.dumps(line), file=notes)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    strategy = NotingFedAvg(context, min_available_nodes=int(config["devices"]), min_train_nodes=1)

    def between(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        strategy.note("between", round=server_round)
        time.sleep(float(config["between-s"]))
        return MetricRecord({"round": float(server_round)})

    PowerAware(
        strategy,
        coordinator=str(config["coordinator"]) or None,
        # One board trains faster if it shall be the first. With the same name, its observations would contradict what
        # other runs have observed, and it would be left out of rounds.
        workload="noted-rounds-one-first" if config["first"] else "noted-rounds",
        allowance_s=float(config["allowance-s"]),
        patience_s=60.0,
        survey_s=None,
        measures_left_out=False,
    ).start(
        grid,
        ArrayRecord([np.zeros(4, dtype=np.float32)]),
        num_rounds=int(config["rounds"]),
        timeout=60,
        evaluate_fn=between,
    )
