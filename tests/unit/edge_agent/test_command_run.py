"""`wattfleet agent run`: its settings, and the signals that end it."""

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

    async def run_agent(settings, board, profiled, device_folder, stop):
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
    async def run_agent(settings, board, profiled, device_folder, stop):
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stop.is_set()

    monkeypatch.setattr("edge_agent.runtime.agent.run_agent", run_agent)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run().code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_options_override_the_environment_which_overrides_the_file(agent, tmp_path, monkeypatch):
    config = tmp_path / "agent.toml"
    config.write_text(
        '[device]\nid = "from-file"\nseed = 3\n[recovery]\nretry_s = 60\n[session]\nsilence_timeout_s = 20\n'
    )
    monkeypatch.setenv("WATTFLEET_AGENT_RECOVERY_RETRY_S", "90")
    options = ("run", "--device", "simulated:orin-nano", "--minibatches-per-epoch", 100, "--config", config)
    ended = agent(*options, "--device-id", "from-option", "--print-config")
    assert ended.code == 0
    for line in ('id = "from-option"', "seed = 3", "retry_s = 90.0", "silence_timeout_s = 20.0", "idle_s = 20.0"):
        assert line in ended.out.splitlines(), ended.out


def test_settings_are_printed_though_required_ones_are_missing(agent, tmp_path):
    ended = agent("run", "--print-config", "--device-id", "orin-0")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert "# Missing: --device. The command does not start without them." in lines
    assert {"# Required. Missing.", "# spec =", 'id = "orin-0"', "seed = 0"} <= set(lines)
    config = tmp_path / "agent.toml"
    config.write_text(ended.out)
    completed = agent("run", "--config", config, "--device", "host", "--minibatches-per-epoch", 9, "--print-config")
    assert completed.code == 0 and "Missing" not in completed.out
    assert {'id = "orin-0"', "minibatches_per_epoch = 9"} <= set(completed.out.splitlines())


def test_printed_settings_are_checked_even_if_others_are_missing(agent):
    ended = agent("run", "--print-config", "--device-id", "", "--minibatches-per-epoch", 0)
    assert ended.code == 2
    assert (
        "--minibatches-per-epoch must be 1 or more, not 0" in ended.err and "--device-id must not be empty" in ended.err
    )


def test_missing_settings_are_named_with_the_options_that_set_them(agent):
    ended = agent("run", "--device", "simulated:orin-nano")
    assert ended.code == 2
    assert "--device-id is required: pass it, or set 'id' in [device] of the settings file" in ended.err


@pytest.fixture
def started_with(monkeypatch):
    """The settings that the agent was started with."""
    seen = []

    async def run_agent(settings, board, profiled, device_folder, stop):
        seen.append((settings, device_folder))

    monkeypatch.setattr("edge_agent.runtime.agent.run_agent", run_agent)
    return seen


def test_the_agent_runs_with_the_effective_settings(run, started_with, tmp_path):
    assert run().code == 0
    ((settings, device_folder),) = started_with
    assert (settings.device.id, settings.profile.minibatches_per_epoch) == ("orin-nano-0", 100)
    assert (settings.device.state_dir, device_folder) == (tmp_path, tmp_path / "device")
