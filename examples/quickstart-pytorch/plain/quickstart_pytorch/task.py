"""The network, the data and the training, without any federated code."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

TEST_IMAGES = 360


class Net(nn.Module):
    """A small convolutional network for `[n, 1, 8, 8]` images of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, `[n, 10]`."""
        return self.classifier(self.features(images).flatten(1))


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images; every process makes the same split."""
    data = load_digits()
    images = torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1)
    everything = TensorDataset(images, torch.tensor(data.target))
    train_images = len(everything) - TEST_IMAGES
    return random_split(everything, [train_images, TEST_IMAGES], torch.Generator().manual_seed(0))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> DataLoader:
    """One node's share of the training images."""
    images, _ = digits()
    mine = torch.utils.data.Subset(images, range(partition_id, len(images), num_partitions))
    return DataLoader(mine, batch_size=batch_size, shuffle=True)


def load_test_data() -> DataLoader:
    """The held-out test images."""
    return DataLoader(digits()[1], batch_size=128)


def train(net: nn.Module, batches: DataLoader, epochs: int, learning_rate: float, device: torch.device) -> float:
    """Train in place, and return the mean loss of all batches."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net: nn.Module, batches: DataLoader, device: torch.device) -> tuple[float, float]:
    """Mean loss per image, and accuracy from 0 to 1."""
    net.to(device).eval()
    loss = correct = count = 0.0
    with torch.no_grad():
        for images, labels in batches:
            logits, labels = net(images.to(device)), labels.to(device)
            loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
    return loss / count, correct / count
