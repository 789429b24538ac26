"""The device's side: replies with the times at which its process began and the app had what it imports."""

from __future__ import annotations

import importlib
import time

import psutil
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Import what a training would import, and reply at once; times are seconds since 1970."""
    called_s = time.time()
    if context.run_config["torch"]:
        importlib.import_module("torch")
    times = {"started_s": psutil.Process().create_time(), "called_s": called_s, "trained_s": time.time()}
    return Message(RecordDict({"times": MetricRecord(times)}), reply_to=message)
