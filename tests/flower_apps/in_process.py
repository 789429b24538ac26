"""Runs an app with all of its nodes in this process, and writes down what was sent.

    python -m tests.flower_apps.in_process SETTINGS

The settings are JSON: `app`, the folder of the app; `into`, the folder for its files and for what is written;
`config`, values of its run config; `sockets`, the sockets of the agents; `run_id`.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from queue import Queue
from threading import Event, Lock, Thread
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import flatten_dict

from tests.fakes.flower_in_process import OneRunGrid
from tests.flower_apps.examples import components
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import IDENTIFY_KEY, PREDICTION_KEY, RECORD_KEY, WORK_KEY

_OWN = (RECORD_KEY, PREDICTION_KEY, WORK_KEY)


def main() -> None:
    """Run the app that the settings name."""
    settings = json.loads(sys.argv[1])
    app, into = Path(settings["app"]), Path(settings["into"])
    into.mkdir(parents=True)
    os.chdir(into)
    sys.path.insert(0, str(app))
    run_id = settings["run_id"]
    be_task(run_id, 1)
    described = components(app)
    config = flatten_dict(described.get("config", {}))
    fractions = {key: 1.0 for key in config if key.startswith("fraction-")}
    config.update({**fractions, **settings["config"]})
    ClientApp.__init__ = _with_exclusive(ClientApp.__init__)
    server, client = (_at(described["components"][each]) for each in ("serverapp", "clientapp"))
    seed("server")
    grid = NodesGrid(run_id, client, config, settings["sockets"])
    try:
        server(grid, Context(run_id, 1, {}, RecordDict(), config))
    finally:
        grid.write(into.parent)


_ONE_AT_A_TIME = Lock()


def _with_exclusive(init: Callable[..., None]) -> Callable[..., None]:
    """Have every ClientApp run one call at a time, each with random numbers of its own."""

    def changed(app: Any, client_fn: Any = None, mods: Any = None) -> None:
        init(app, client_fn, [*(mods or []), exclusive])

    return changed


def exclusive(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """The last mod: it begins random numbers anew for each node and round, and leaves those of the server alone."""
    with _ONE_AT_A_TIME:
        state = random.getstate(), np.random.get_state()
        seed(message.metadata.dst_node_id, message.metadata.message_type, round_of(message))
        try:
            return call_next(message, context)
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])


def round_of(message: Message) -> str:
    """The number of a message's round, as far as the app states it."""
    config = message.content.get("config", {})
    return str(config.get("server-round", message.metadata.group_id or ""))


def seed(*what: object) -> None:
    """Begin all random numbers anew."""
    number = zlib.crc32(repr(what).encode())
    random.seed(number)
    np.random.seed(number)
    for name, begin in (("torch", "manual_seed"), ("tensorflow", "random.set_seed")):
        if name in sys.modules:
            found: Any = sys.modules[name]
            for part in begin.split("."):
                found = getattr(found, part)
            found(number)


def _at(component: str) -> Callable[..., Any]:
    module, _, name = component.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


class NodesGrid(OneRunGrid):
    """Nodes that handle one message after the other, all at the same time unless the app uses torch.

    The mod replaces how torch iterates over a loader, for the one training of its process.
    """

    def __init__(self, run_id: int, app: Callable[..., Any], config: dict[str, Any], sockets: dict[str, str]) -> None:
        super().__init__(run_id, "flwrlabs/example")
        self._app = app
        self._contexts = {
            101 + k: Context(
                run_id,
                101 + k,
                {"partition-id": k, "num-partitions": 4, "device-id": device_id, "agent-socket": socket},
                RecordDict(),
                config,
            )
            for k, (device_id, socket) in enumerate(sockets.items())
        }
        self._replies: dict[str, Message] = {}
        self._arrived = Event()
        self._sent: dict[str, dict[str, Any]] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._metrics: dict[str, dict[str, list[float]]] = {}
        self._failures: list[str] = []
        shared: Queue[Message] = Queue()
        self._waiting = {each: shared if "torch" in sys.modules else Queue() for each in self._contexts}
        for waiting in {id(each): each for each in self._waiting.values()}.values():
            Thread(target=self._handle, args=(waiting,), daemon=True).start()

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            record = message.content.get(RECORD_KEY, {})
            if IDENTIFY_KEY not in record and not record.get("measures", False):
                self._note(message)
            self._waiting[message.metadata.dst_node_id].put(message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(each) for each in list(message_ids) if each in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        missing = list(self.push_messages(list(messages)))
        replies: list[Message] = []
        while missing:
            self._arrived.wait(0.05)
            self._arrived.clear()
            found = list(self.pull_messages(missing))
            missing = [each for each in missing if each not in {r.metadata.reply_to_message_id for r in found}]
            replies += found
        return replies

    def _handle(self, waiting: Queue[Message]) -> None:
        while True:
            message = waiting.get()
            metadata = message.metadata
            context = self._contexts[metadata.dst_node_id]
            content = copy.deepcopy(message.content)  # as over the network, what an app changes is not sent
            received = Message(content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type)
            received.metadata.__dict__.update({k: v for k, v in metadata.__dict__.items() if k != "_src_node_id"})
            try:
                reply = self._app(received, context)
            except Exception as error:  # the boundary of Flower's process of a ClientApp
                self._failures.append(f"{type(error).__name__}: {error}"[:300])
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
            reply.metadata.__dict__["_reply_to_message_id"] = metadata.message_id
            if not reply.has_error() and IDENTIFY_KEY not in message.content.get(RECORD_KEY, {}):
                self._note_metrics(message, reply)
            self._replies[metadata.message_id] = reply
            self._arrived.set()

    def _note(self, message: Message) -> None:
        key = f"{message.metadata.message_type}/{round_of(message)}"
        content = {name: record for name, record in message.content.items() if name not in _OWN}
        told = self._sent.setdefault(key, {"nodes": [], "records": sorted(content), "config": {}})
        told["nodes"] = sorted([*told["nodes"], message.metadata.dst_node_id])
        for name, record in content.items():
            if isinstance(record, ArrayRecord):
                arrays = [each.numpy() for each in record.values()]
                is_numbers = all(each.dtype.kind == "f" for each in arrays)
                flat = [np.ravel(each).astype(np.float64) for each in arrays if is_numbers]
                self._arrays[key] = np.concatenate(flat) if flat else np.zeros(0)
                told["sizes"] = [int(each.size) for each in arrays] if is_numbers else []
            else:
                told["config"][name] = {k: str(v)[:80] for k, v in record.items() if not isinstance(v, bytes)}

    def _note_metrics(self, message: Message, reply: Message) -> None:
        kept = self._metrics.setdefault(f"{message.metadata.message_type}/{round_of(message)}", {})
        for record in reply.content.metric_records.values():
            for name, value in record.items():
                if isinstance(value, (int, float)) and not name.startswith("wattfleet"):
                    kept.setdefault(name, []).append(float(value))

    def write(self, folder: Path) -> None:
        """Write what was sent and answered."""
        means = {key: {name: float(np.mean(v)) for name, v in each.items()} for key, each in self._metrics.items()}
        told = {"sent": self._sent, "metrics": means, "failures": self._failures}
        (folder / "told.json").write_text(json.dumps(told, indent=1))
        np.savez(folder / "arrays.npz", **{key.replace("/", "_"): values for key, values in self._arrays.items()})


if __name__ == "__main__":
    main()
