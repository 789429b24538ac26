"""The ClientApp: a training that only takes time, on a device without an agent."""

from __future__ import annotations

import time

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Report which device this is, or wait and reply with the same arrays."""
    if IDENTIFY_KEY in message.content[RECORD_KEY]:
        identity = ConfigRecord({DEVICE_ID_KEY: str(context.node_config[DEVICE_ID_KEY])})
        return Message(RecordDict({RECORD_KEY: identity}), reply_to=message)
    time.sleep(float(context.run_config["train-s"]))
    [arrays] = message.content.array_records.values()
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)
