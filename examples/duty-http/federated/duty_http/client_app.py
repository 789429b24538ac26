"""The ClientApp, which runs on each node and trains between the requests that its device answers."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wattfleet.flower import power_mode_mod
from wattfleet.serving import share_device

app = ClientApp(mods=[power_mode_mod])


def new_network() -> nn.Module:
    """A small convolutional network for `[n, 1, 8, 8]` images of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
    )


def load_data() -> DataLoader:
    """The handwritten digits that come with scikit-learn."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size=32, shuffle=True)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received network, and send it back."""
    net, loader = new_network(), load_data()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(int(context.run_config["local-epochs"])):
        for images, labels in share_device(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
