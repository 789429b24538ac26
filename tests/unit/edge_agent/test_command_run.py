"""`wattfleet agent run`: its settings, and the signals that stop it."""

import asyncio
import os
import signal
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from wattfleet_identity.authority import CertificateAuthority
from wattfleet_identity.certificates import new_key, read_certificate, read_key, to_pem
from wattfleet_identity.identity_folder import Identity, write_identity
from wattfleet_identity.peers import Peer, Role
from wattfleet_io.clock import utc_now


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
    enrol_for_clients_only(tmp_path / "identity")
    earlier = run("0.0.0.0:9466")
    assert (
        earlier.code == 2
        and "was issued by an earlier coordinator for clients only" in earlier.err
        and "loopback" in earlier.err
    )


def enrol_for_clients_only(folder):
    """Store a device's identity whose certificate is for clients only, as earlier coordinators issued it."""
    authority, key = CertificateAuthority.create("fleet", utc_now()), new_key()
    uri = Peer("fleet", Role.DEVICE, "orin-nano-0").uri
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(read_certificate(authority.certificate_pem).subject)
        .public_key(read_key(key).public_key())
        .serial_number(1)
        .not_valid_before(utc_now() - timedelta(days=1))
        .not_valid_after(utc_now() + timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .sign(read_key(authority.key_pem), hashes.SHA256())
    )
    write_identity(folder, Identity(key, to_pem(certificate), authority.certificate_pem))
