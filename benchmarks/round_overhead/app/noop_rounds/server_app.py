"""The ServerApp: sends a message to each node in every round, and records when the replies arrive."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from wattfleet.common.clock import SystemClock
from wattfleet.flower.server.grids import WaitingGrid

app = ServerApp()


def _unchanged(timeout: float | None) -> float | None:
    return timeout


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds, and write each one's times as a JSON line."""
    if context.run_config["waiting"] == "wattfleet":
        grid = WaitingGrid(grid, _unchanged, _unchanged, SystemClock())
    while len(list(grid.get_node_ids())) < int(context.run_config["devices"]):
        time.sleep(0.2)
    arrays = ArrayRecord([np.zeros((64, 64), dtype=np.float32)])
    with Path(str(context.run_config["result"])).open("w", encoding="utf-8", buffering=1) as result:
        for number in range(1, int(context.run_config["rounds"]) + 1):
            content = RecordDict({"arrays": arrays})
            messages = [
                Message(content, node_id, "train", group_id=str(number)) for node_id in sorted(grid.get_node_ids())
            ]
            pushed_s = time.time()
            replies = list(grid.send_and_receive(messages, timeout=120))
            pulled_s = time.time()
            nodes = [dict(reply.content["times"]) for reply in replies if reply.has_content()]
            print(json.dumps({"pushed_s": pushed_s, "pulled_s": pulled_s, "nodes": nodes}), file=result)
