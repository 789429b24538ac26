"""The ClientApp: replies with the times at which its process started and its imports were done."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def _started_s() -> float:
    """Return when this process started, in seconds since 1970."""
    after_boot_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot_ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


@app.train()
def train(message: Message, context: Context) -> Message:
    """Import what a training would import, and reply at once. Times are seconds since 1970."""
    called_s = time.time()
    if context.run_config["torch"]:
        importlib.import_module("torch")
    times = {"started_s": _started_s(), "called_s": called_s, "trained_s": time.time()}
    return Message(RecordDict({"times": MetricRecord(times)}), reply_to=message)
