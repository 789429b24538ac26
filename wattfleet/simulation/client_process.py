"""Runs a ClientApp for simulated devices, each message in a process of its own.

Flower's simulation engine has a few actors, which train for one device after the other in one Python process: what an
app keeps in a module, such as a cache or a random number generator, would reach the next device. So each actor starts
one fork server (this program), which imports the app once, and forks for each message. It reads pickled requests from
its standard input, one after the other, and writes pickled answers to its standard output.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from wattfleet.core.errors import WattfleetError
from wattfleet.flower.client.agent_training import SIMULATED_AGENT, TrainingDeadline
from wattfleet.flower.supernode.fork_server import UnfitImportError, import_all, loaded_libraries
from wattfleet.simulation.flower_task import be_task
from wattfleet_proto.assignment import RoundAssignment
from wattfleet_proto.v1 import local_pb2

SIMULATED_KEY = "wattfleet.simulated"
"""The record with which a simulation tells a client how it trains, and gets its report."""

_APP_FAILED, _PROCESS_ENDED = 5, 0  # of flwr.common.constant.ErrorCode: CLIENT_APP_RAISED_EXCEPTION and UNKNOWN
_LENGTH = struct.Struct("<Q")
_WARM, _COLD = "warm", "cold"
# Not `-m`, since what this module pickles would then belong to a module `__main__`.
_PROGRAM = "from wattfleet.simulation.client_process import main; main()"


# --- Simulated agent --------------------------------------------------------------------------------------------------
# The agent of a simulated device, as far as its app can tell.


@dataclass(frozen=True)
class ClientTask:
    """How a client handles one message.

    Attributes:
        seed: what its random numbers depend on, besides the device and the message.
        measures: whether the training ends as soon as the facts of its loader are known.
        most_minibatches: the minibatches that the device trains before its deadline; None if there is no deadline.
    """

    seed: int
    measures: bool = False
    most_minibatches: int | None = None

    def to_record(self) -> ConfigRecord:
        """Return the record for the message."""
        most = {} if self.most_minibatches is None else {"most-minibatches": self.most_minibatches}
        return ConfigRecord({"seed": self.seed, "measures": self.measures, **most})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> ClientTask:
        """Read the record of a message."""
        return cls(record["seed"], record["measures"], record.get("most-minibatches"))


@dataclass(frozen=True)
class ClientReport:
    """What a client has done.

    Attributes:
        minibatches: how many minibatches it has trained; None if it reports none.
        batch: samples in a minibatch; None if it reports none.
        loader_workers: processes that load its data; None if it reports none.
        length: minibatches of one pass over its data; None if it reports none.
        is_power_aware: whether the app has the mod.
    """

    minibatches: int | None = None
    batch: int | None = None
    loader_workers: int | None = None
    length: int | None = None
    is_power_aware: bool = False


class _MinibatchDeadline(TrainingDeadline):
    """A deadline in minibatches, since this process's time is not that of the device."""

    def __init__(self, epochs: float, most_minibatches: int | None) -> None:
        super().__init__(epochs, None)
        self._most = most_minibatches

    def _is_over(self, now_s: float) -> bool:
        return self.cut or (self._most is not None and self._done >= self._most)


class CountingAgent:
    """Answers an app as a device's agent does, and counts what it trains."""

    def __init__(self, task: ClientTask) -> None:
        """Begin with nothing trained.

        Args:
            task: how the client handles its message.
        """
        self.channel = self
        self._task = task
        self._loader: local_pb2.LoaderSeen | None = None
        self._epochs, self._counted = 0.0, 0
        self._is_asked = False

    def deadline(self, assignment: RoundAssignment) -> TrainingDeadline:
        """See `wattfleet.flower.client.agent_training.AgentOfSimulation`."""
        return _MinibatchDeadline(assignment.epochs, self._task.most_minibatches)

    def unary_unary(self, method: str, *_: object, **__: object) -> Callable[..., Any] | None:
        """Return a call, as gRPC's channel does."""
        return {"NoteUnplanned": self._note_unplanned}.get(method.rpartition("/")[2])

    def stream_stream(self, method: str, *_: object, **__: object) -> Callable[..., Any] | None:
        """Return a call, as gRPC's channel does."""
        return {"Train": self._train}.get(method.rpartition("/")[2])

    def _note_unplanned(self, _: local_pb2.NoteUnplannedRequest, timeout: float) -> local_pb2.NoteUnplannedResponse:
        self._is_asked = True
        return local_pb2.NoteUnplannedResponse()

    def _train(self, requests: Iterable[local_pb2.TrainRequest]) -> Iterator[local_pb2.TrainResponse]:
        self._is_asked = True
        for request in requests:
            if request.HasField("start"):
                self._epochs = request.start.epochs
                yield local_pb2.TrainResponse(started=local_pb2.TrainingStarted())
            elif request.HasField("loader"):
                self._loader = request.loader
            elif request.HasField("minibatches"):
                self._counted += len(request.minibatches.minibatches)
                noted = local_pb2.MinibatchesNoted(measuring=not self._task.measures)
                yield local_pb2.TrainResponse(noted=noted)
            else:
                if request.finish.HasField("epochs_done"):
                    self._epochs = request.finish.epochs_done
                yield local_pb2.TrainResponse(finished=local_pb2.TrainingFinished())

    def report(self, is_identity: bool) -> ClientReport:
        """Return what was trained.

        Args:
            is_identity: whether the mod has answered for the device.
        """
        is_aware = self._is_asked or is_identity
        seen = self._loader
        if seen is None:
            return ClientReport(self._counted or None, is_power_aware=is_aware)
        facts = {
            name: getattr(seen, name) if seen.HasField(name) else None
            for name in ("batch", "loader_workers", "minibatches_per_epoch")
        }
        length = facts.pop("minibatches_per_epoch")
        # An app may train more passes than its strategy has stated.
        trained = max(self._counted, 0 if length is None else round(self._epochs * length))
        return ClientReport(trained or None, length=length, is_power_aware=is_aware, **facts)


# --- One message ------------------------------------------------------------------------------------------------------


def handled(
    app: Callable[[Message, Context], Message], message: Message, context: Context
) -> tuple[Message, RecordDict, ClientReport]:
    """Run a ClientApp on one message; return its reply, its state, and what it has done."""
    task = ClientTask.from_record(message.content.pop(SIMULATED_KEY))
    metadata = message.metadata
    be_task(metadata.run_id, metadata.dst_node_id)
    seed_all(task.seed, context.node_config["partition-id"], metadata.message_type, _round_of(message))
    agent = CountingAgent(task)
    token = SIMULATED_AGENT.set(agent)
    is_identity = False
    try:
        reply = app(message, context)
        is_identity = not reply.has_error() and "device-id" in reply.content.get("wattfleet", {})
    except Exception as error:  # the boundary of Flower's process of a ClientApp
        reply = Message(Error(_APP_FAILED, f"{type(error).__name__}: {error}"), reply_to=message)
    finally:
        SIMULATED_AGENT.reset(token)
    return reply, context.state, agent.report(is_identity)


def _round_of(message: Message) -> str:
    """Return the number of a message's round, as far as its strategy states it."""
    for record in message.content.config_records.values():
        if "server-round" in record:
            return str(record["server-round"])
    return str(message.metadata.group_id)


def seed_all(*what: object) -> None:
    """Begin the random numbers of Python, NumPy, PyTorch and TensorFlow anew, as far as the app has imported them."""
    number = zlib.crc32(repr(what).encode())
    random.seed(number)
    for name, path in (("numpy", "random.seed"), ("torch", "manual_seed"), ("tensorflow", "random.set_seed")):
        found: Any = sys.modules.get(name)
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            found(number)


# --- Fork server ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Import the app, and fork for each request. Arguments: the app's folder, its ClientApp, `warm` or `cold`."""
    folder, reference, imports = sys.argv[1:]
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the app prints goes to the log
    sys.path.insert(0, folder)
    if imports == _WARM:
        try:
            import_all([reference.partition(":")[0]])
        except UnfitImportError as error:
            print(f"{error}, so each message imports it anew", file=sys.stderr, flush=True)
            _write(replies, pickle.dumps(_COLD))
            return
        # The garbage collector ignores frozen objects, so that the forked processes share their memory.
        gc.collect()
        gc.freeze()
    _write(replies, pickle.dumps(_WARM))
    while (request := _read(requests)) is not None:
        answer, libraries = _forked(reference, request)
        if libraries and imports == _WARM:
            # What the app imports while it trains, such as PyTorch's compiler with its first optimizer: seconds.
            try:
                import_all(libraries)
            except UnfitImportError as error:
                print(f"{error}, so each message imports the app anew", file=sys.stderr, flush=True)
                _write(replies, pickle.dumps((_COLD, answer)))
                return
        _write(replies, pickle.dumps((_WARM, answer)))


def _forked(reference: str, request: bytes) -> tuple[bytes, list[str]]:
    """Handle a request in a new process.

    Returns:
        Its pickled answer, or its exit code if it has died; and the libraries that it has imported.
    """
    received, sent = os.pipe()
    if child := os.fork():
        os.close(sent)
        with os.fdopen(received, "rb") as answers:
            # Not up to the end of the file, since a process that the app has left behind may hold the pipe open.
            content = _read(answers)
        _, status = os.waitpid(child, 0)
        if status or content is None:
            return pickle.dumps(os.waitstatus_to_exitcode(status)), []
        found: tuple[bytes, list[str]] = pickle.loads(content)
        return found
    status = 1
    try:
        os.close(received)
        known = set(sys.modules)
        message, context = pickle.loads(request)
        module, _, name = reference.partition(":")
        answer = pickle.dumps(handled(_lazily(module, name), message, context))
        libraries = loaded_libraries((ClientApp,), known)
        with os.fdopen(sent, "wb") as answers:
            _write(answers, pickle.dumps((answer, libraries)))
        sys.stdout.flush()
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's may be cleaned up here
    raise AssertionError("the process has ended")


def _lazily(module: str, name: str) -> Callable[[Message, Context], Message]:
    """Return the ClientApp of a module, which is imported by its first call."""

    def call(message: Message, context: Context) -> Message:
        app: Any = import_module(module)
        for part in name.split("."):
            app = getattr(app, part)
        reply: Message = app(message, context)
        return reply

    return call


def _write(to: IO[bytes], content: bytes) -> None:
    to.write(_LENGTH.pack(len(content)))
    to.write(content)
    to.flush()


def _read(source: IO[bytes]) -> bytes | None:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = source.read(length)
    return content if len(content) == length else None


class ForkServerError(WattfleetError):
    """The process that runs the clients has ended."""


class ForkServer:
    """A running fork server, as one of Flower's actors uses it.

    Args:
        folder: the app's folder.
        reference: its ClientApp, such as `my_app.client_app:app`.
        log: the file for what the clients print; ignored if it cannot be written here.
    """

    def __init__(self, folder: str, reference: str, log: str) -> None:
        self._app = folder, reference, log
        self._process = self._started(*self._app, _WARM)
        if self._answer() == _COLD:
            self._start_cold()

    def _start_cold(self) -> None:
        """Start again without the app's imports, which a fork would break."""
        self.close()
        self._process = self._started(*self._app, _COLD)
        self._answer()

    @staticmethod
    def _started(folder: str, reference: str, log: str, imports: str) -> subprocess.Popen[bytes]:
        # A thread pool does not survive a fork; Flower's actors share the cores already.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        with suppress(OSError), Path(log).open("ab") as file:
            return _popen(folder, reference, imports, environment, file)
        return _popen(folder, reference, imports, environment, subprocess.DEVNULL)

    def handle(self, message: Message, context: Context) -> tuple[Message, RecordDict, ClientReport]:
        """Run the ClientApp on one message in a process of its own.

        Raises:
            ForkServerError: the server has ended.
        """
        assert self._process.stdin is not None, "it is a pipe"
        try:
            _write(self._process.stdin, pickle.dumps((message, context)))
        except BrokenPipeError:
            raise ForkServerError(self._why_ended()) from None
        imports, content = self._answer()
        if imports == _COLD:
            self._start_cold()
        answer = pickle.loads(content)
        if isinstance(answer, int):
            why = f"signal {-answer}" if answer < 0 else f"exit code {answer}"
            error = Error(_PROCESS_ENDED, f"the client's process ended with {why}")
            return Message(error, reply_to=message), context.state, ClientReport()
        found: tuple[Message, RecordDict, ClientReport] = answer
        return found

    def close(self) -> None:
        """End the server."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        content = _read(self._process.stdout)
        if content is None:
            raise ForkServerError(self._why_ended())
        return pickle.loads(content)

    def _why_ended(self) -> str:
        return f"the process that runs the clients ended with exit code {self._process.wait()}"


def _popen(folder: str, reference: str, imports: str, environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, folder, reference, imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
    )


# --- Isolated app -----------------------------------------------------------------------------------------------------

_SERVERS: dict[IsolatedApp, ForkServer] = {}


@dataclass(frozen=True)
class IsolatedApp:
    """A ClientApp whose every message is handled in a process of its own; for Flower's actors.

    Attributes:
        folder: the app's folder.
        reference: its ClientApp, such as `my_app.client_app:app`.
        log: the file for what the clients print.
    """

    folder: str
    reference: str
    log: str

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message; the reply has a record with what was done."""
        if self not in _SERVERS:
            _SERVERS[self] = ForkServer(self.folder, self.reference, self.log)
            atexit.register(_SERVERS[self].close)
        be_task(message.metadata.run_id, message.metadata.dst_node_id)
        reply, context.state, report = _SERVERS[self].handle(message, context)
        if not reply.has_error():
            known = {name: value for name, value in vars(report).items() if value is not None}
            reply.content[SIMULATED_KEY] = ConfigRecord(known)
        return reply

    def itself(self) -> IsolatedApp:
        """Return it; Flower's actors take a function that loads the app."""
        return self
