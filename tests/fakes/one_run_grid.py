"""The common part of all fakes of Flower's grid: it belongs to one run, and takes messages as Flower's own does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid


class OneRunGrid(Grid):
    """A grid of one run, which cannot be changed.

    Args:
        run_id: id of the run.
        app: name of the app; empty if Flower does not report it.

    Attributes:
        run_config: values of the app's configuration that the run overrides.
    """

    def __init__(self, run_id: int | str, app: str = "") -> None:
        self.run_config: dict[str, str | int | float | bool] = {}
        self._run_id = run_id
        self._app_name = app
        self._numbered = 0

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=self._run_id, fab_id=self._app_name, override_config=self.run_config)

    def set_run(self, run: Any) -> None:
        raise AssertionError("the run is fixed")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise AssertionError("deprecated in Flower")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        sent = self._taken(messages)
        if sent:
            self._send(sent)
        return [message.metadata.message_id for message in sent]

    def _taken(self, messages: Iterable[Message]) -> list[Message]:
        """Take messages as Flower 1.41's grid does: iterate over them twice, for their ids and to send them.

        Raises:
            httpx.HTTPStatusError: the second time, there were none.
        """
        if not messages:
            return []
        for message in messages:
            self._number(message)
        sent = list(messages)
        if not sent:
            raise internal_server_error("push-messages")
        return sent

    @abstractmethod
    def _send(self, messages: list[Message]) -> None:
        """Send messages that have an id."""

    def _number(self, message: Message) -> str:
        """Give a message an id, as Flower's grid does; returns the id."""
        self._numbered += 1
        message_id = f"message-{self._numbered}"
        message.metadata.__dict__["_message_id"] = message_id
        return message_id


def internal_server_error(method: str) -> httpx.HTTPStatusError:
    """The error of Flower 1.41's grid if the SuperLink answers 500, for example to a request without messages."""
    request = httpx.Request("POST", f"http://127.0.0.1:8000/v1/runtime/{method}")
    response = httpx.Response(500, json={"detail": "Internal server error."}, request=request)
    text = f"Server error '500 Internal Server Error' for url '{request.url}'"
    return httpx.HTTPStatusError(text, request=request, response=response)
