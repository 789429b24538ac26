"""The ClientApp, which runs on each node."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart_sklearn.task import load_data, new_model, set_weights, weights_of
from quickstart_sklearn.task import test as test_model
from quickstart_sklearn.task import train as train_model
from wattfleet.flower import power_mode_mod

app = ClientApp(mods=[power_mode_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on the node's own images, and send it back."""
    config = context.run_config
    model = new_model(float(config["learning-rate"]))
    set_weights(model, message.content["arrays"].to_numpy_ndarrays())
    batches = load_data(
        int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]), int(config["batch-size"])
    )
    loss = train_model(model, batches, int(config["local-epochs"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.labels)})
    return Message(RecordDict({"arrays": ArrayRecord(weights_of(model)), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the received model on the test images."""
    model = new_model()
    set_weights(model, message.content["arrays"].to_numpy_ndarrays())
    loss, accuracy, images = test_model(model)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": images})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
