"""The ClientApp. Wattfleet's parts are the mod, and the loader's wrapper with which the agent can measure modes."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from wattfleet.flower import planned_work, power_mode_mod, profiled, until_deadline

app = ClientApp(mods=[power_mode_mod])


@app.train()
def train_locally(message: Message, context: Context) -> Message:
    """Train the global model on the device's own digits."""
    # Imported here, since Flower starts a process for each message, and messages that request the device id need no
    # torch.
    import torch

    from wattfleet.simulation.digits_app.task import (
        NETWORKS,
        Minibatches,
        device_data,
        scaled_learning_rate,
        train,
    )

    torch.set_num_threads(1)
    config = context.run_config
    partition = int(context.node_config["partition-id"])
    data = device_data(partition, int(config["devices"]), int(config["seed"]), str(config["data-file"]))
    network = NETWORKS[str(config["network"])]()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    seed = int(config["seed"]) + int(message.content["config"]["server-round"])
    work = planned_work(int(config["batch-size"]), epochs=int(config["local-epochs"]))
    loader = until_deadline(profiled(Minibatches(data, work.batch, seed, work.passes)))
    loss = train(
        network,
        [loader] * work.epochs,
        learning_rate=scaled_learning_rate(float(config["learning-rate"]), int(config["batch-size"])) * work.lr_scale,
    )
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
