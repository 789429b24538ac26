"""The service's settings: the agent gets what `install` writes, and settings written by earlier versions still work."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from edge_agent.systemd.installation import SETTINGS_PATH, UNIT_PATH, ServiceSettings, installation
from wattfleet.errors import InvalidInputError
from wattfleet_identity.authority import CertificateAuthority
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_identity.identity_folder import Identity, write_identity
from wattfleet_identity.peers import Peer, Role
from wattfleet_io.clock import utc_now
from wattfleet_io.systemd import InstalledCode

CODE = InstalledCode(program=Path("/bin/sh"), interpreter=(), imported=())
OLD_EXEC = (
    "/opt/wattfleet/bin/wattfleet agent run --device ${WATTFLEET_DEVICE} --device-id ${WATTFLEET_DEVICE_ID}"
    " --coordinator ${WATTFLEET_COORDINATOR} --minibatches-per-epoch ${WATTFLEET_MINIBATCHES_PER_EPOCH}"
    " $WATTFLEET_WORKLOAD"
)
OLD_SETTINGS = {
    "WATTFLEET_DEVICE": "host",
    "WATTFLEET_DEVICE_ID": "jetson-1",
    "WATTFLEET_COORDINATOR": "site.example:7070",
    "WATTFLEET_MINIBATCHES_PER_EPOCH": "2000",
    "WATTFLEET_WORKLOAD": "--workload resnet18 --minibatch 16 --processor cuda",
}


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


def test_a_simulated_board_is_installed_without_options_of_a_workload(settings_of):
    settings = settings_of(*planned(ServiceSettings("simulated:orin-nano", "nano", "127.0.0.1:7070")))
    assert (settings.workload.name, settings.profile.minibatches_per_epoch) == (None, None)


def test_what_install_is_told_of_a_workload_reaches_the_agent(settings_of):
    settings = settings_of(*planned(ServiceSettings("host", "jetson-1", "127.0.0.1:7070", 500, "lstm", 32, "cpu")))
    assert (settings.workload.name, settings.workload.minibatch, settings.workload.processor) == ("lstm", 32, "cpu")
    assert settings.profile.minibatches_per_epoch == 500


def test_a_service_that_was_installed_earlier_goes_on_once_plaintext_is_allowed(settings_of):
    settings = settings_of(started(OLD_EXEC, OLD_SETTINGS), OLD_SETTINGS | {"WATTFLEET_AGENT_SESSION_INSECURE": "true"})
    assert (settings.workload.name, settings.profile.minibatches_per_epoch) == ("resnet18", 2000)


def test_earlier_settings_serve_the_new_unit(settings_of):
    plan = installation(ServiceSettings("host", "a", "site.example:7070"), CODE, allow_writable=True)
    (command,) = [line for line in plan.files[UNIT_PATH].splitlines() if line.startswith("ExecStart=")]
    local = OLD_SETTINGS | {"WATTFLEET_COORDINATOR": "127.0.0.1:7070"}
    assert settings_of(started(command, local), local).workload.name == "resnet18"


def test_an_installed_service_without_an_identity_says_how_to_enrol(agent):
    done = agent(*started(OLD_EXEC, OLD_SETTINGS))
    assert done.code != 0 and "wattfleet coordinator invite" in done.err and "--insecure" in done.err


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("simulated:orin-nano", "nano", "site.example:7070", None, "lstm"), "omit --workload"),
        (("host", "a", "site.example:7070", 0), "--minibatches-per-epoch must be at least 1, not 0"),
        (("host", "a", "site.example:7070", None, "resnet"), "unknown workload 'resnet'"),
        (("host", "a b", "site.example:7070"), "device id 'a b'"),
    ],
)
def test_settings_that_cannot_be_stored_are_refused(values, why):
    with pytest.raises(InvalidInputError, match=why):
        ServiceSettings(*values)


@pytest.fixture
def install(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("wattfleet_io.systemd.running_code", lambda: CODE)

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
