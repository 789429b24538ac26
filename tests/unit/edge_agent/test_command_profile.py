"""`wattfleet agent profile`: measures modes, can be stopped at any moment, and continues where it stopped."""

import errno
import json
import os
import signal
import time

import pytest

import reference_models
from edge_agent.cli.options import DEFAULT_TOLERANCE
from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.training.mode_change import BACKUP_FILE, backed_up
from tests.fakes.jetson_boards import ORIN_NANO
from tests.fakes.jetson_tree import FakedJetson
from tests.fakes.stored_workloads import only_workload
from tests.fixtures.edge_agent import PROFILED
from wattfleet.choosing import SamplingSettings
from wattfleet.modes import array_to_modes
from wattfleet.prediction import write_artefact
from wattfleet_io.clock import SystemClock


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def profile(agent, state):
    return lambda *arguments, device=PROFILED: agent(
        "profile", "--device", device, "--state-dir", state, "--device-id", "jetson-1", *arguments
    )


@pytest.fixture
def board(as_device):
    """A simulated board in a mode that its owner set. Like a real board, it keeps its state between commands."""
    device = open_virtual_board(PROFILED, seed=0)
    device.apply(array_to_modes(device.modes)[777])
    as_device(device)
    return device


def journalled(state):
    return (only_workload(state) / "profile.jsonl").read_text().splitlines()[1:]


def sending(number, device, at_mode):
    """Send the process a signal, twice, during the measurement of mode number `at_mode`, counted from 1."""
    applied, real_apply, real_step = [], device.apply, device.step

    def apply(mode):
        applied.append(mode)
        real_apply(mode)

    def step():
        real_step()
        if len(applied) == at_mode:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    device.apply, device.step = apply, step
    return applied


# --- the usual case -------------------------------------------------------------------------------------------------


def test_modes_are_measured_shown_and_fitted(profile, agent, state):
    ended = profile("--modes", 6, "--json")
    assert ended.code == 0
    content = ended.content
    assert (content["device_id"], content["provenance"], content["workload"]) == (
        "jetson-1",
        "simulated",
        "built-in",
    )
    assert len(content["modes"]) == len(journalled(state)) == 6
    assert "6 of at most 6: measured" in ended.err
    status = agent("status", "--device", PROFILED, "--state-dir", state, "--json").content
    assert status["workloads"]["built-in"]["predictor"]["digest"] == content["predictor"]["digest"]
    assert status["workloads"]["built-in"]["profile"]["measured_modes"] == 6
    assert agent("choose", "--budget-w", 10, "--device", PROFILED, "--state-dir", state).code == 0


def test_a_second_run_goes_on_where_the_first_ended(profile, state):
    profile("--modes", 6)
    first = journalled(state)
    ended = profile("--modes", 8)
    assert ended.code == 0 and "6 modes already measured" in ended.err
    assert journalled(state)[:6] == first and len(journalled(state)) == 8
    assert "8 modes." in ended.out and max(map(len, ended.out.splitlines()[:-1])) <= 100, "the last is a command"


def test_a_wide_tolerance_ends_early_and_none_never_does(profile, state):
    early = profile("--modes", 14, "--tolerance", 0.9)
    measured = len(journalled(state))
    assert (
        5 <= measured < 14 and f"{measured} modes of at most 14; stopped early: more modes would not help" in early.out
    )
    profile("--modes", 14, "--tolerance", 0)
    assert len(journalled(state)) == 14


def test_the_usual_tolerance_is_that_of_the_sampling():
    assert DEFAULT_TOLERANCE == SamplingSettings.tolerance


def test_the_name_of_a_profile_already_begun_is_kept(profile, agent, state):
    profile("--modes", 5)
    ended = agent("profile", "--device", PROFILED, "--state-dir", state, "--modes", 5, "--json")
    assert ended.content["device_id"] == "jetson-1"


def test_a_reference_in_a_directory_is_transferred_and_kept_for_later_fits(profile, tmp_path, state):
    reference = reference_models.load("agx_orin_resnet18")
    write_artefact(reference, tmp_path / "mine")
    assert profile("--modes", 5, "--reference", tmp_path / "mine").code == 0
    assert [kept.name for kept in (state / "references").iterdir()] == [reference.digest]


# --- stopped during a measurement -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_what_was_measured_and_puts_the_device_back(profile, state, board, number):
    owners, handler = board.current_mode(), signal.getsignal(number)
    sending(number, board, at_mode=4)
    ended = profile("--modes", 6)
    assert ended.code == 128 + number
    assert "stopped; 3 modes measured and saved, device restored" in ended.err
    assert len(journalled(state)) == 3
    assert board.current_mode() == owners and not (state / "device" / BACKUP_FILE).exists()
    assert signal.getsignal(number) is handler


def test_a_closed_terminal_does_not_stop_what_nohup_began(profile, state, board):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        sending(signal.SIGHUP, board, at_mode=4)
        assert profile("--modes", 6).code == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(journalled(state)) == 6


def test_a_signal_while_the_device_is_put_back_does_not_stop_that(profile, state, board, monkeypatch):
    owners, real = board.current_mode(), board.restore

    def restore(knobs):
        os.kill(os.getpid(), signal.SIGINT)
        real(knobs)

    monkeypatch.setattr(board, "restore", restore)
    assert profile("--modes", 5).code == 0
    assert board.current_mode() == owners and not (state / "device" / BACKUP_FILE).exists()


def test_what_was_stopped_goes_on_with_what_is_missing(profile, state, board):
    applied = sending(signal.SIGINT, board, at_mode=4)
    profile("--modes", 6)
    first, applied[:] = journalled(state), [None] * 4
    assert profile("--modes", 6).code == 0
    assert journalled(state)[:3] == first and len(journalled(state)) == 6
    modes = [tuple(json.loads(line)["mode"]) for line in journalled(state)]
    assert len(set(modes)) == 6


def test_a_device_in_use_is_left_to_its_agent(profile, state, board):
    with backed_up(board, state / "device"):
        ended = profile("--modes", 6)
    assert ended.code == 1 and "stop that agent first" in ended.err and not (state / "workloads").exists()


# --- a Jetson -------------------------------------------------------------------------------------------------------


@pytest.fixture
def jetson(tmp_path, as_device):
    faked = FakedJetson(tmp_path / "root", ORIN_NANO)
    as_device(SysfsDevice(faked, SystemClock(), faked.run))
    return faked


@pytest.mark.timeout(60)
def test_a_jetson_is_measured_by_training_on_it_and_put_back(profile, state, jetson, monkeypatch):
    before = jetson.everything()
    changed = []

    def steps(spec, minibatch, processor):
        assert (spec, minibatch, processor) == ("apps:train", 4, "cpu")
        return lambda: Training(jetson, changed)

    monkeypatch.setattr("edge_agent.profiling.profiled_workload.workload_steps", steps)
    ended = profile(
        *("--workload", "apps:train", "--minibatch", 4, "--processor", "cpu", "--modes", 1, "--json"), device="auto"
    )
    assert ended.code == 0, ended.err
    assert ended.content["workload"] == "apps:train" and ended.content["minibatch"] == 4
    assert ended.content["modes"][0]["power_w"] == pytest.approx(7.0, rel=0.05)
    assert any(state != before for state in changed) and jetson.everything() == before


def test_a_jetson_stopped_in_the_middle_of_a_mode_is_as_its_owner_left_it(profile, state, jetson, monkeypatch):
    before, changed = jetson.everything(), []

    class Stopping(list):
        def append(self, seen):
            changed.append(seen)
            if len(changed) == 5:
                os.kill(os.getpid(), signal.SIGINT)

    training = Training(jetson, Stopping())
    monkeypatch.setattr("edge_agent.profiling.profiled_workload.workload_steps", lambda *_: lambda: training)
    ended = profile("--workload", "resnet18", device="auto")
    assert ended.code == 130 and "stopped; 0 modes measured" in ended.err
    assert len(changed) == 5 and changed[-1] != before, "the fan is held, and the mode is set"
    assert jetson.everything() == before and not (state / "device" / BACKUP_FILE).exists()


class Training:
    """Trains on a faked Jetson whose measured power fluctuates, as on real ones."""

    def __init__(self, jetson, seen):
        self._jetson, self._seen, self._steps = jetson, seen, 0
        self._amperes = jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input")[0]
        self._milliamperes = int(jetson.read(self._amperes))

    def __enter__(self):
        return self._step

    def __exit__(self, *_):
        pass

    def _step(self):
        time.sleep(0.02)
        self._steps += 1
        self._jetson.put(self._amperes, self._milliamperes + self._steps % 7)
        self._seen.append(self._jetson.everything())


def test_a_jetson_whose_rail_is_silent_is_not_begun(profile, state, jetson):
    for path in jetson.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input"):
        jetson.unreadable[path] = errno.EIO
    before = jetson.everything()
    ended = profile("--workload", "resnet18", device="auto")
    assert ended.code == 1 and "power cannot be read, so no mode can be measured" in ended.err
    assert jetson.everything() == before and not (state / "workloads").exists()


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--modes", 0), "0 is not in the range"),
        (("--tolerance", 1), "--tolerance must be at least 0 and below 1, not 1"),
        (("--workload", "resnet18"), "needs no workload; omit --workload"),
        (("--reference", "nowhere"), "choose one of agx_orin_resnet18, or a directory"),
        (("--device", "auto", "--workload", "resnet19"), "unknown workload 'resnet19'"),
        (("--device", "host"), "pass --workload resnet18"),
        (("--device-id", "other", "--modes", 5), "belongs to device_id 'jetson-1', not 'other'"),
    ],
)
def test_bad_input_is_answered_with_what_to_do(profile, state, arguments, said):
    if "--device-id" in arguments:
        profile("--modes", 5)
    ended = profile(*arguments)
    assert ended.code == 2 and ended.out == ""
    assert said in " ".join(ended.err.replace("│", " ").split()), ended.err


def test_a_state_directory_that_cannot_be_made_is_named(agent, tmp_path):
    (tmp_path / "file").write_text("")
    ended = agent("profile", "--device", PROFILED, "--state-dir", tmp_path / "file" / "state", "--modes", 5)
    assert ended.code != 0 and ended.err.count("\n") == 1 and str(tmp_path / "file") in ended.err


def test_the_daemon_takes_a_tolerance_too(agent, state):
    ended = agent(
        *("run", "--device", PROFILED, "--device-id", "jetson-1", "--minibatches-per-epoch", 9, "--state-dir", state),
        *("--tolerance", 1),
    )
    assert ended.code == 2 and "--tolerance must be below 1, not 1" in ended.err
