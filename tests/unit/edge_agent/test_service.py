"""The agent as a service: `wattfleet agent run`, the signals that stop it, and the settings that `install` writes."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from edge_agent.systemd.installation import SETTINGS_PATH, UNIT_PATH, ServiceSettings, installation
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.authority import CertificateAuthority
from wattfleet.common.identity.certificates import new_key, request_certificate
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.common.systemd import InstalledCode
from wattfleet.core.errors import InvalidInputError

# --- `run` ------------------------------------------------------------------------------------------------------------
# `wattfleet agent run`: its settings, and the signals that stop it.


@pytest.fixture
def run(agent, tmp_path):
    return lambda: agent(
        *("run", "--device", "simulated:orin-nano", "--device-id", "orin-nano-0"),
        *("--minibatches-per-epoch", 100, "--state-dir", tmp_path),
    )


@pytest.fixture
def ended_by(monkeypatch):
    """Replace the agent by one that sends itself the last signal in this list and then waits to be stopped."""
    sent = []

    async def run_agent(settings, board, profiled, device_folder, stop):
        os.kill(os.getpid(), sent[-1])
        await asyncio.wait_for(stop.wait(), 10)

    monkeypatch.setattr("edge_agent.runtime.agent.run_agent", run_agent)
    return sent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_good_order(run, ended_by, number):
    # If the command does not handle the signal, the test fails instead of being killed.
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
    config.write_text('[device]\nid = "from-file"\nseed = 3\n[session]\nsilence_timeout_s = 20\nstop_timeout_s = 60\n')
    monkeypatch.setenv("WATTFLEET_AGENT_SESSION_STOP_TIMEOUT_S", "90")
    options = ("run", "--device", "simulated:orin-nano", "--minibatches-per-epoch", 100, "--config", config)
    ended = agent(*options, "--device-id", "from-option", "--print-config")
    assert ended.code == 0
    for line in (
        'id = "from-option"',
        "seed = 3",
        "stop_timeout_s = 90.0",
        "silence_timeout_s = 20.0",
        "minibatch = 16",
    ):
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


def test_metrics_for_other_machines_are_refused_before_the_device_is_opened(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_agent.devices.selection.open_device", lambda *_, **__: pytest.fail("it was opened"))

    def run(address, *more):
        return agent(
            *("run", "--device", "simulated:orin-nano", "--device-id", "orin-nano-0", "--state-dir", tmp_path),
            *("--metrics-address", address, *more),
        )

    refused = run("0.0.0.0:9466")
    assert refused.code == 2
    for words in ("--metrics-address 0.0.0.0:9466: other machines can reach it", "wattfleet agent join", "--insecure"):
        assert words in refused.err
    assert run("9466", "--insecure").code == 2


# --- Service settings -------------------------------------------------------------------------------------------------
# The service's settings: the agent gets what `install` writes.

CODE = InstalledCode(program=Path("/bin/sh"), interpreter=(), imported=())


def started(command: str, environment: Mapping[str, str]) -> list[str]:
    """The arguments of `wattfleet agent` after systemd expands them: a word `$NAME` becomes any number of words."""
    words: list[str] = []
    for word in command.split():
        if word.startswith("$") and not word.startswith("${"):
            words += shlex.split(environment[word[1:]])
        elif word.startswith("${"):
            words.append(environment[word[2:-1]])
        else:
            words.append(word)
    return words[words.index("run") :]


def planned(settings: ServiceSettings) -> tuple[list[str], dict[str, str]]:
    plan = installation(settings, CODE, allow_writable=True)
    lines = [line for line in plan.files[SETTINGS_PATH].splitlines() if not line.startswith("#")]
    environment = dict(line.split("=", 1) for line in lines)
    (command,) = [
        line.removeprefix("ExecStart=") for line in plan.files[UNIT_PATH].splitlines() if line.startswith("ExecStart=")
    ]
    return started(command, environment), environment


@pytest.fixture
def settings_of(agent, monkeypatch):
    """Run the agent with some arguments and environment variables; returns the settings it gets."""

    def settings_of(words, environment):
        seen = []

        async def run_agent(settings, board, profiled, device_folder, stop):
            seen.append(settings)

        monkeypatch.setattr("edge_agent.runtime.agent.run_agent", run_agent)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        done = agent(*words)
        assert done.code == 0, done
        return seen[0]

    return settings_of


def test_a_service_is_installed_without_a_word_about_networks_and_data(settings_of):
    words, environment = planned(ServiceSettings("host", "jetson-1", "site.example:7070", is_insecure=True))
    assert "--workload" not in words and "--minibatches-per-epoch" not in words
    settings = settings_of(words, environment)
    assert settings.endpoint().is_exposed
    assert (settings.device.id, settings.session.coordinator) == ("jetson-1", "site.example:7070")
    assert (settings.workload.name, settings.profile.minibatches_per_epoch) == (None, None)


def test_where_ordered_measurements_compute_reaches_the_agent(settings_of):
    settings = settings_of(*planned(ServiceSettings("host", "jetson-1", "127.0.0.1:7070", processor="cpu")))
    assert settings.workload.processor == "cpu"


def test_a_simulated_board_is_installed_without_options_of_a_workload(settings_of):
    settings = settings_of(*planned(ServiceSettings("simulated:orin-nano", "nano", "127.0.0.1:7070")))
    assert (settings.workload.name, settings.profile.minibatches_per_epoch) == (None, None)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("host", "a b", "site.example:7070"), "device id 'a b'"),
        (("host", "a", "site.example:7070", "cuda", False, "127.0.0.1"), "is not an address"),
    ],
)
def test_settings_that_cannot_be_stored_are_refused(values, why):
    with pytest.raises(InvalidInputError, match=why):
        ServiceSettings(*values)


@pytest.fixture
def install(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("wattfleet.common.systemd.running_code", lambda: CODE)

    def install(*words):
        command = ("install", "--coordinator", "site.example:7070", "--dry-run", "--allow-writable", "--root", tmp_path)
        return agent(*command, *words)

    return install


def test_install_asks_for_the_coordinator_alone_on_an_enrolled_device(install, tmp_path):
    authority, key, now = CertificateAuthority.create("fleet", utc_now()), new_key(), utc_now()
    peer = Peer("fleet", Role.DEVICE, "jetson-1")
    certificate = authority.issue(request_certificate(key), peer, timedelta(days=30), now)
    write_identity(tmp_path / "var/lib/wattfleet/identity", Identity(key, certificate, authority.certificate_pem))
    done = install()
    assert done.code == 0
    assert "WATTFLEET_WORKLOAD=--processor cuda\n" in done.out and "INSECURE" not in done.out
    assert "plaintext" not in done.err


def test_a_service_without_an_identity_is_not_installed(install, tmp_path):
    done = install()
    assert done.code != 0 and list(tmp_path.iterdir()) == []
    assert "wattfleet agent join" in done.err and "--insecure" in done.err


def test_a_service_in_plaintext_is_installed_with_a_warning(install):
    done = install("--insecure")
    assert done.code == 0 and "WATTFLEET_AGENT_SESSION_INSECURE=true\n" in done.out
    assert "warning: the connection to site.example:7070 is plaintext" in done.err


def test_a_service_serves_the_metrics_that_install_was_told_to(settings_of):
    assert settings_of(*planned(ServiceSettings("host", "jetson-1", "127.0.0.1:7070"))).metrics.address is None
    local = ServiceSettings("host", "jetson-1", "127.0.0.1:7070", metrics_address="127.0.0.1:9466")
    assert settings_of(*planned(local)).metrics.address == "127.0.0.1:9466"


def test_metrics_for_other_machines_are_not_installed_without_a_certificate(agent, install, tmp_path):
    done = install("--metrics-address", "0.0.0.0:9466")
    assert done.code == 2 and list(tmp_path.iterdir()) == []
    assert "--metrics-address 0.0.0.0:9466: other machines can reach it" in done.err
    assert install("--metrics-address", "9466", "--insecure").code == 2
    plaintext = install("--metrics-address", "0.0.0.0:9466", "--insecure")
    assert plaintext.code == 0 and "WATTFLEET_AGENT_METRICS_ADDRESS=0.0.0.0:9466\n" in plaintext.out
