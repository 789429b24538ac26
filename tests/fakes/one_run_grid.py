"""The common part of all fakes of Flower's grid: it belongs to one run, and numbers its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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

    def _number(self, message: Message) -> str:
        """Give a message an id, as Flower's server does; returns the id."""
        self._numbered += 1
        message_id = f"message-{self._numbered}"
        message.metadata.__dict__["_message_id"] = message_id
        return message_id
