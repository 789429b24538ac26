"""`wattfleet agent profile` with each method, and `fit`: what is measured, stored and fitted again."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import time

import numpy as np
import pytest

import reference_models
from edge_agent.cli.options import DEFAULT_TOLERANCE
from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.sysfs import SysfsDevice
from edge_agent.profiling.stored_profile import read_predictor, read_profile
from edge_agent.training.mode_change import BACKUP_FILE, backed_up
from tests.fakes.agent_settings import only_workload
from tests.fakes.faked_jetson import ORIN_NANO, FakedJetson
from tests.fixtures.edge_agent import PROFILED
from wattfleet.common.clock import SystemClock
from wattfleet.core.choosing import SamplingSettings
from wattfleet.core.modes import BOARDS, Profile, array_to_modes, write_profile
from wattfleet.core.modes import Profile as Rows
from wattfleet.core.prediction import RooflinePredictor, read_artefact, restore_predictor, write_artefact

# --- `profile` --------------------------------------------------------------------------------------------------------
# `wattfleet agent profile`: measures modes, can be stopped at any moment, and continues where it stopped.


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


# --- `profile --method` -----------------------------------------------------------------------------------------------
# `wattfleet agent profile --method ...`: what each method measures, and that the journal records the method.

NANO = BOARDS["orin-nano"].space


@pytest.fixture
def small(tmp_path):
    """A replayed board with 12 modes, which brute force can measure in minutes."""
    modes = NANO.array()[[row for row in range(len(NANO)) if row % 150 == 149]]
    work = modes.prod(axis=1) ** 0.25
    path = tmp_path / "small.csv"
    write_profile(Rows(modes, 4e8 / work, 6e3 + work / 1e3), path)
    return f"replay:{path}"


def journalled_rows(state):
    return [json.loads(line) for line in (only_workload(state) / "profile.jsonl").read_text().splitlines()[1:]]


def measured(state):
    return [tuple(line["mode"]) for line in journalled_rows(state) if "kind" not in line]


def methods(state):
    return [line["method"] for line in journalled_rows(state) if line.get("kind") == "method"]


def test_transfer_is_the_default_and_needs_no_record(profile, agent, state):
    profile("--modes", 6)
    named = profile("--modes", 7, "--method", "transfer", "--tolerance", 0, "--json").content
    assert methods(state) == [] and named["method"] == "transfer" and len(named["modes"]) == 7
    status = agent("status", "--device", PROFILED, "--state-dir", state, "--json").content
    assert status["workloads"]["built-in"]["profile"]["method"] == "transfer"


def test_scratch_fits_without_a_reference(profile, agent, state):
    ended = profile("--method", "scratch", "--modes", 8, "--tolerance", 0, "--json")
    assert ended.code == 0, ended.err
    assert methods(state) == ["scratch"] and len(measured(state)) == 8
    stored = read_predictor(only_workload(state))
    assert stored.details.provenance["reference"] == "none"
    again = agent("fit", "--device", PROFILED, "--state-dir", state, "--json")
    assert again.code == 0 and again.content["predictor"]["digest"] == stored.digest
    assert isinstance(restore_predictor(stored), RooflinePredictor)


def test_scratch_does_not_depend_on_the_reference(profile, agent, state, tmp_path):
    profile("--method", "scratch", "--modes", 8, "--tolerance", 0)
    first = measured(state)
    from_reference = tmp_path / "other"
    agent(
        *("profile", "--device", PROFILED, "--state-dir", from_reference, "--device-id", "jetson-1"),
        *("--modes", 8, "--tolerance", 0),
    )
    assert first[:5] == measured(from_reference)[:5], "both begin with modes that are spread over the space"
    assert first[5:] != measured(from_reference)[5:]


def test_binary_search_ends_by_itself_near_each_budget(profile, agent, state):
    ended = profile("--method", "binary-search", "--budget-w", 10, "--budget-w", 13)
    assert ended.code == 0, ended.err
    assert methods(state) == ["binary-search"]
    assert len(measured(state)) <= 2 * 15
    assert "all searches have ended" in " ".join(ended.out.split())
    for budget in (10, 13):
        within = [line["power_mw"] for line in journalled_rows(state) if line.get("power_mw", 1e9) <= budget * 1e3]
        assert 0.85 * budget * 1e3 <= max(within)
        assert agent("choose", "--budget-w", budget, "--device", PROFILED, "--state-dir", state).code == 0


def test_brute_force_measures_every_mode_once(profile, state, small):
    ended = profile("--method", "brute-force", "--json", device=small)
    assert ended.code == 0, ended.err
    assert methods(state) == ["brute-force"]
    assert len(set(measured(state))) == len(measured(state)) == ended.content["at_most"] == 12


def test_a_brute_force_of_many_hours_has_to_be_confirmed(profile, state):
    ended = profile("--method", "brute-force")
    assert ended.code == 2 and not (state / "workloads").exists()
    assert "brute force measures 1,800 modes, which takes about " in ended.err and " h: pass --yes" in ended.err


def test_a_grid_is_measured_once_and_continues_where_it_stopped(profile, state, untouched_board):
    applied = stopped(untouched_board, at_mode=3)
    assert profile("--method", "grid", "--modes", 16).code == 130 and len(measured(state)) == 2
    ended = profile("--method", "grid", "--modes", 20, "--json")
    assert ended.code == 0, ended.err
    extremes = [(min(knob), max(knob)) for knob in zip(*array_to_modes(untouched_board.modes), strict=True)]
    assert methods(state) == ["grid"] and ended.content["at_most"] == 16 and len(applied) >= 17
    assert sorted(measured(state)) == sorted(itertools.product(*extremes))


def test_a_grid_of_hours_has_to_be_confirmed(profile, state):
    ended = profile("--method", "grid")
    assert ended.code == 2 and not (state / "workloads").exists()
    assert "the grid measures 540 modes, which takes about " in ended.err and " h: pass --yes" in ended.err


@pytest.fixture
def untouched_board(as_device):
    """A simulated board that keeps its state between commands."""
    device = open_virtual_board(PROFILED, seed=0)
    as_device(device)
    return device


def stopped(device, at_mode):
    """Send an interrupt during the measurement of mode number `at_mode`, counted from 1."""
    applied, real_apply, real_step = [], device.apply, device.step

    def apply(mode):
        applied.append(mode)
        real_apply(mode)

    def step():
        real_step()
        if len(applied) == at_mode:
            os.kill(os.getpid(), signal.SIGINT)

    device.apply, device.step = apply, step
    return applied


@pytest.mark.parametrize(
    "arguments", [("scratch", "--modes", 7, "--tolerance", 0), ("binary-search", "--budget-w", 10)]
)
def test_an_interrupted_method_continues_where_it_stopped(profile, agent, state, tmp_path, untouched_board, arguments):
    whole = tmp_path / "whole"
    agent(*("profile", "--device", PROFILED, "--state-dir", whole, "--device-id", "jetson-1", "--method", *arguments))
    applied = stopped(untouched_board, at_mode=4)
    assert profile("--method", *arguments).code == 130
    first = measured(state)
    assert len(first) == 3
    applied[:] = [None] * 4
    assert profile("--method", *arguments).code == 0
    assert measured(state)[:3] == first and len(set(measured(state))) == len(measured(state))
    assert methods(state) == [arguments[0]]
    assert len(measured(state)) == pytest.approx(len(measured(whole)), abs=2)


def test_a_journal_names_each_method_that_added_modes(profile, state):
    profile("--modes", 5)
    profile("--method", "binary-search", "--budget-w", 10)
    profile("--method", "transfer", "--modes", 24, "--tolerance", 0)
    kinds = [line.get("method", "mode") for line in journalled_rows(state)]
    assert kinds[:6] == ["mode"] * 5 + ["binary-search"]
    assert methods(state) == ["binary-search", "transfer"]


def test_auto_takes_the_advice_and_says_why(profile):
    short = profile("--method", "auto", "--training-hours", 0.1, "--workload-changes", "often", "--json")
    assert short.code == 0, short.err
    assert short.content["method"] == "transfer" and len(short.content["modes"]) == 5
    assert "auto: transfer with 5 modes takes the least time in all" in short.err
    assert short.content["reason"].startswith("transfer with 5 modes")


def test_auto_lets_every_search_end_as_binary_search_does(profile, agent, tmp_path):
    board, searches = "simulated:xavier-agx", ("--budget-w", 12, "--budget-w", 20)
    found = profile("--method", "auto", "--training-hours", 0.003, *searches, "--json", device=board).content
    assert found["method"] == "binary-search"
    place = ("--device", board, "--state-dir", tmp_path / "other", "--device-id", "jetson-1")
    alone = agent("profile", *place, "--method", "binary-search", *searches, "--json").content
    assert [row["argument"] for row in found["modes"]] == [row["argument"] for row in alone["modes"]]


def test_auto_measures_a_small_board_as_a_whole(profile, state, small):
    ended = profile("--method", "auto", "--training-hours", 5000, "--workload-changes", "never", "--json", device=small)
    assert ended.code == 0, ended.err
    assert ended.content["method"] == "brute-force" and len(measured(state)) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "auto"), "--method auto needs --training-hours"),
        (("--method", "binary-search"), "needs a budget: pass --budget-w once for each budget"),
        (("--method", "binary-search", "--budget-w", "nan"), "--budget-w must be finite and above 0 W"),
        (("--method", "binary-search", "--budget-w", 0), "--budget-w must be finite and above 0 W"),
        (("--budget-w", 10), "--budget-w applies only to --method auto and binary-search; omit it"),
        (("--training-hours", 3), "--training-hours applies only to --method auto; omit it"),
        (("--workload-changes", "often"), "--workload-changes applies only to --method auto; omit it"),
        (("--method", "brute-force", "--modes", 9), "--modes applies only to"),
        (("--method", "scratch", "--modes", 4), "--method scratch needs --modes 5 or more, not 4"),
        (("--method", "luck"), "'luck' is not one of"),
        (("--method", "auto", "--training-hours", -1), "hours of training must be finite and above 0, not -1"),
    ],
)
def test_bad_options_of_a_method_are_answered_with_what_to_do(profile, state, arguments, said):
    ended = profile(*arguments)
    assert ended.code == 2 and ended.out == "" and not (state / "workloads").exists()
    assert said in " ".join(ended.err.replace("│", " ").split()), ended.err


# --- `fit` ------------------------------------------------------------------------------------------------------------
# `wattfleet agent fit`: the predictor is fitted again from the journal alone.

REFERENCE = "agx_orin_resnet18"


@pytest.fixture
def copied_state(profiled_state, tmp_path):
    return shutil.copytree(profiled_state, tmp_path / "copied", ignore=shutil.ignore_patterns("*.sock"))


@pytest.fixture
def fit(agent, copied_state):
    return lambda *arguments, device=PROFILED: agent("fit", "--device", device, "--state-dir", copied_state, *arguments)


def test_the_same_journal_gives_the_predictor_of_the_daemon(fit, copied_state):
    before = read_artefact(only_workload(copied_state) / "predictor")
    content = fit("--json").content
    assert (
        content["predictor"]["digest"]
        == before.digest
        == read_artefact(only_workload(copied_state) / "predictor").digest
    )
    assert content["fitted_to_modes"] == 12


def test_a_predictor_that_was_lost_is_made_again(fit, copied_state):
    before = read_artefact(only_workload(copied_state) / "predictor").digest
    shutil.rmtree(only_workload(copied_state) / "predictor")
    ended = fit()
    assert ended.code == 2 and "pass the reference to transfer from" in ended.err
    assert (
        fit("--reference", REFERENCE, "--minibatches-per-epoch", 2000, "--json").content["predictor"]["digest"]
        == before
    )


def test_the_known_loader_workers_are_kept_whatever_else_is_stated(agent, tmp_path):
    place = ("--device", PROFILED, "--state-dir", tmp_path)
    agent("profile", *place, "--device-id", "jetson-1", "--modes", 2, "--loader-workers", 0)
    ended = agent("fit", *place, "--reference", REFERENCE, "--minibatches-per-epoch", 7)
    assert ended.code == 0, ended.err
    details = read_artefact(only_workload(tmp_path) / "predictor").details
    assert (details.facts.loader_workers, details.workload.minibatches_per_epoch) == (0, 7)


def test_a_corpus_is_fitted_again_without_errors_of_single_modes(agent, tmp_path):
    modes = BOARDS["agx-orin"].space.array()[::42]
    work = modes.prod(axis=1) ** 0.25
    csv, place = tmp_path / "corpus.csv", ("--state-dir", tmp_path / "state")
    write_profile(Profile(modes, 4e8 / work, 6e3 + work / 1e3), csv)
    device = ("--device", f"replay:{csv}")
    agent("profile", *device, *place, "--device-id", "jetson-1", "--method", "brute-force", "--yes")
    ended = agent("fit", *device, *place, "--json")
    assert ended.code == 0, ended.err
    assert (ended.content["fitted_to_modes"], ended.content["left_out"]) == (len(modes), None)


def test_the_errors_are_those_of_modes_that_the_fit_has_not_seen(fit, copied_state):
    profile = read_profile(only_workload(copied_state)).profile
    content = fit("--json").content["left_out"]
    prior = restore_predictor(reference_models.load(REFERENCE), BOARDS["orin-nano"])
    errors = []
    for left in range(len(profile)):
        rest = np.arange(len(profile)) != left
        others = Profile(profile.modes[rest], profile.minibatch_ms[rest], profile.power_mw[rest])
        foreseen = RooflinePredictor.fit(others, prior).predict(profile.modes[[left]])
        errors.append(foreseen.minibatch_ms[0] / profile.minibatch_ms[left] - 1)
    said = [mode["time_error"] for mode in content["modes"]]
    # The formula that leaves out a mode keeps the other parts of the fit, so it only comes close to a fit without it.
    assert np.corrcoef(errors, said)[0, 1] > 0.8
    assert content["median_time_error"] == pytest.approx(np.median(np.abs(said)))


def test_the_table_says_how_good_it_is_and_what_bounds_the_highest_mode(fit, agent, copied_state):
    ended = fit()
    assert ended.code == 0
    words = " ".join(ended.out.split())
    assert (
        "Median error: " in words
        and "% in power." in words
        and "The highest mode, 6c 1.51/0.62/2.13: Bound by" in words
    )
    explained = agent(
        *("explain", "6,1510400,624750000,2133000000", "--device", PROFILED, "--state-dir", copied_state, "--json")
    )
    assert fit("--json").content["highest_mode"]["explanation"]["words"] == explained.content["words"]


def test_what_is_measured_later_joins(fit, agent, copied_state):
    agent("profile", "--device", PROFILED, "--state-dir", copied_state, "--modes", 13, "--tolerance", 0)
    assert fit("--json").content["fitted_to_modes"] == 13


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "simulated:orin-nx"), "holds the profile of the board orin-nano, but this device is orin-nx"),
        (("--reference", "nowhere"), "unknown reference 'nowhere': choose one of"),
    ],
)
def test_bad_input_leaves_the_predictor_alone(fit, copied_state, arguments, said):
    before = read_artefact(only_workload(copied_state) / "predictor").digest
    ended = fit(*arguments)
    assert ended.code == 2 and said in ended.err
    assert read_artefact(only_workload(copied_state) / "predictor").digest == before


def test_nothing_measured_is_nothing_to_fit(agent, tmp_path):
    ended = agent("fit", "--device", PROFILED, "--state-dir", tmp_path / "empty")
    assert ended.code == 2 and "no mode is measured yet; run `wattfleet agent profile`" in ended.err
