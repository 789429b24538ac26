"""A training with the number of epochs that the plan has chosen, from the message to the agent's observation."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Context, Message

from tests.fakes.agent_socket import agent_at, answered, assigned, context
from wattfleet_flower import planned_work, power_mode_mod
from wattfleet_proto.assignment import RECORD_KEY, TOOK_EPOCHS_KEY, WORK_KEY, AssignedWork, RoundAssignment

MINIBATCHES = 100
"""Minibatches per epoch, as known to the agent."""


def observed_epoch_s(folder: Path, epochs: int) -> float:
    """Seconds per epoch, as the agent observes them in a training of this many planned epochs."""
    folder.mkdir()
    request = assigned()
    record = RoundAssignment("7/1", "orin-nano-0", epochs=float(epochs)).to_record()
    request.content[RECORD_KEY] = ConfigRecord(record)
    request.content[WORK_KEY] = ConfigRecord(AssignedWork(epochs=epochs).to_record())
    with agent_at(folder / "agent.sock") as agent:

        def app(message: Message, where: Context) -> Message:
            for _ in range(MINIBATCHES * planned_work(16, epochs=2).epochs):
                agent.board.step()
            return answered(message, where)

        reply = power_mode_mod(request, context(**{"agent-socket": str(agent.socket), "auto-profile": False}), app)
        [observation] = agent.reports.observations
    assert reply.content[RECORD_KEY][TOOK_EPOCHS_KEY] is True
    assert reply.content[RECORD_KEY]["observed-epoch-s"] == observation.epoch_s
    return observation.epoch_s


def test_an_epoch_is_observed_to_take_as_long_whatever_the_number_of_epochs(tmp_path: Path) -> None:
    few, many = (observed_epoch_s(tmp_path / str(epochs), epochs) for epochs in (1, 5))
    assert few == pytest.approx(many, rel=0.02)
