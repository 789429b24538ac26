"""`wattfleet agent run`: what ends it."""

import asyncio
import os
import signal

import pytest


@pytest.fixture
def run(agent, tmp_path):
    return lambda: agent(
        *("run", "--device", "simulated:orin-nano", "--device-id", "orin-nano-0"),
        *("--minibatches-per-epoch", 100, "--state-dir", tmp_path),
    )


@pytest.fixture
def ended_by(monkeypatch):
    """The signals that were sent to an agent that ended."""
    sent = []

    async def run_agent(config, board, profiled, stop):
        os.kill(os.getpid(), sent[-1])
        await asyncio.wait_for(stop.wait(), 10)

    monkeypatch.setattr("edge_agent.runtime.agent.run_agent", run_agent)
    return sent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_good_order(run, ended_by, number):
    # Unhandled, the signal must end no test run.
    before = signal.signal(number, lambda *_: pytest.fail("not handled"))
    try:
        ended_by.append(number)
        assert run().code == 0
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_does_not_end_it(run, monkeypatch):
    async def run_agent(config, board, profiled, stop):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()

    monkeypatch.setattr("edge_agent.runtime.agent.run_agent", run_agent)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run().code == 0
    finally:
        signal.signal(signal.SIGHUP, before)
