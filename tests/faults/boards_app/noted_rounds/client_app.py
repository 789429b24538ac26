"""The ClientApp: a training that only takes time, in the power mode that the board's agent sets."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from wattfleet.flower import power_mode_mod, until_deadline
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY

_MINIBATCHES = 20


def noting_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Note that the node was asked for its device, or has handled a message, before and after `power_mode_mod`."""
    if IDENTIFY_KEY in message.content.get(RECORD_KEY, {}):
        _note(context, "asked")
        time.sleep(float(context.run_config["identify-s"]))
        return call_next(message, context)
    reply = call_next(message, context)
    _note(context, "handled")
    return reply


app = ClientApp(mods=[noting_mod, power_mode_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Wait, and reply with the same arrays."""
    _note(context, "trains")
    is_first = context.node_config[DEVICE_ID_KEY] == context.run_config["first"]
    training_s = float(context.run_config["first-train-s" if is_first else "train-s"])
    for _ in until_deadline([None] * _MINIBATCHES):
        time.sleep(training_s / _MINIBATCHES)
    [arrays] = message.content.array_records.values()
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


def _note(context: Context, what: str) -> None:
    line = {"what": what, "device": str(context.node_config[DEVICE_ID_KEY]), "pid": os.getpid(), "at_s": time.time()}
    with open(str(context.run_config["notes"]), "a", encoding="utf-8") as notes:
        print(json.dumps({**line, "run": str(context.run_id)}), file=notes)
