"""The device's side. Wattfleet's part is the mod."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from wattfleet_flower import power_mode_mod
from wattfleet_simulation.digits_app.task import DigitsNet, device_data, train

app = ClientApp(mods=[power_mode_mod])


@app.train()
def train_locally(message: Message, context: Context) -> Message:
    """Train the global model on the device's own digits."""
    torch.set_num_threads(1)
    config = context.run_config
    data = device_data(int(context.node_config["partition-id"]), int(config["devices"]), int(config["seed"]))
    network = DigitsNet()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(
        network,
        data,
        epochs=int(config["local-epochs"]),
        learning_rate=float(config["learning-rate"]),
        seed=int(config["seed"]) + int(message.content["config"]["server-round"]),
    )
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
