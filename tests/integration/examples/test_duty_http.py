"""The example of an inference server and a Flower app on one device, over real HTTP."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict

from tests.fakes.duty_agent import duty, duty_agent_at
from tests.fakes.polling import until
from wattfleet_proto.names import CURRENT_SOCKET
from wattfleet_simulation.flower_task import be_task

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "duty-http"
BLACK = [[[0.0] * 8] * 8]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(EXAMPLE / "federated"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("duty_http", "inference_server")]:
        del sys.modules[name]


def test_images_are_answered_over_http_while_the_app_trains(modules, tmp_path, monkeypatch):
    with duty_agent_at(tmp_path / "agent.sock", duty(latency_ms=500)) as agent:
        monkeypatch.setenv("AGENT_SOCKET", agent.socket)
        server_module = importlib.import_module("inference_server")
        client_module = importlib.import_module("duty_http.client_app")
        config = uvicorn.Config(server_module.app, port=0, log_level="warning", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            training = threading.Thread(target=_train, args=(client_module, agent.socket))
            training.start()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client, ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: client.post("/classify", json=BLACK), range(40)))
                wrong = client.post("/classify", json=[1.0, 2.0])
                no_image = client.post("/classify", content="{}")
            training.join(60)
            assert {answer.status_code for answer in answers} == {200}
            assert len({answer.json()["class"] for answer in answers}) == 1
            assert wrong.status_code == 400 and "this server answers (1, 8, 8)" in wrong.json()["error"]
            assert no_image.status_code == 400
            until(lambda: agent.turns.kept_duty().requests == 41)
            assert agent.turns.kept_duty().missed <= 2
            assert agent.turns.kept_duty().training_share > 0
        finally:
            server.should_exit = True
            thread.join(10)


def _message(client_module) -> tuple[Message, Context]:
    be_task(run_id=7, node_id=1)
    arrays = ArrayRecord(client_module.new_network().state_dict())
    message = Message(RecordDict({"arrays": arrays}), dst_node_id=5, message_type="train")
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(run_id=7, node_id=5, node_config={}, state=RecordDict(), run_config={"local-epochs": 1})
    return message, context


def _train(client_module, socket: str) -> None:
    CURRENT_SOCKET.set(socket)  # as the mod does while an app trains
    message, context = _message(client_module)
    client_module.app(message, context)
