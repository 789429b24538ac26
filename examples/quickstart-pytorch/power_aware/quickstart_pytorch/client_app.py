"""The ClientApp, which runs on each node."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart_pytorch.task import Net, load_data, load_test_data
from quickstart_pytorch.task import test as test_net
from quickstart_pytorch.task import train as train_net
from wattfleet.flower import power_mode_mod

app = ClientApp(mods=[power_mode_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received network on the node's own images, and send it back."""
    net, device = _received(message)
    config = context.run_config
    batches = load_data(
        int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]), int(config["batch-size"])
    )
    loss = train_net(net, batches, int(config["local-epochs"]), float(config["learning-rate"]), device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the received network on the test images."""
    net, device = _received(message)
    batches = load_test_data()
    loss, accuracy = test_net(net, batches, device)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(batches.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _received(message: Message) -> tuple[Net, torch.device]:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net, torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
