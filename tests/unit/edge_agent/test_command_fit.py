"""`wattfleet agent fit`: the predictor is fitted again from the journal alone."""

import shutil

import numpy as np
import pytest

import reference_models
from edge_agent.profiling.stored_profile import read_profile
from tests.fakes.stored_workloads import only_workload
from tests.fixtures.edge_agent import PROFILED
from wattfleet.modes import BOARDS, Profile, write_profile
from wattfleet.prediction import RooflinePredictor, read_artefact, restore_predictor

REFERENCE = "agx_orin_resnet18"


@pytest.fixture
def state(profiled_state, tmp_path):
    return shutil.copytree(profiled_state, tmp_path / "copied", ignore=shutil.ignore_patterns("*.sock"))


@pytest.fixture
def fit(agent, state):
    return lambda *arguments, device=PROFILED: agent("fit", "--device", device, "--state-dir", state, *arguments)


def test_the_same_journal_gives_the_predictor_of_the_daemon(fit, state):
    before = read_artefact(only_workload(state) / "predictor")
    content = fit("--json").content
    assert content["predictor"]["digest"] == before.digest == read_artefact(only_workload(state) / "predictor").digest
    assert content["fitted_to_modes"] == 12


def test_a_predictor_that_was_lost_is_made_again(fit, state):
    before = read_artefact(only_workload(state) / "predictor").digest
    shutil.rmtree(only_workload(state) / "predictor")
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


def test_the_errors_are_those_of_modes_that_the_fit_has_not_seen(fit, state):
    profile = read_profile(only_workload(state)).profile
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


def test_the_table_says_how_good_it_is_and_what_bounds_the_highest_mode(fit, agent, state):
    ended = fit()
    assert ended.code == 0
    words = " ".join(ended.out.split())
    assert (
        "Median error: " in words
        and "% in power." in words
        and "The highest mode, 6c 1.51/0.62/2.13: Bound by" in words
    )
    explained = agent(
        *("explain", "6,1510400,624750000,2133000000", "--device", PROFILED, "--state-dir", state, "--json")
    )
    assert fit("--json").content["highest_mode"]["explanation"]["words"] == explained.content["words"]


def test_what_is_measured_later_joins(fit, agent, state):
    agent("profile", "--device", PROFILED, "--state-dir", state, "--modes", 13, "--tolerance", 0)
    assert fit("--json").content["fitted_to_modes"] == 13


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "simulated:orin-nx"), "holds the profile of the board orin-nano, but this device is orin-nx"),
        (("--reference", "nowhere"), "unknown reference 'nowhere': choose one of"),
    ],
)
def test_bad_input_leaves_the_predictor_alone(fit, state, arguments, said):
    before = read_artefact(only_workload(state) / "predictor").digest
    ended = fit(*arguments)
    assert ended.code == 2 and said in ended.err
    assert read_artefact(only_workload(state) / "predictor").digest == before


def test_nothing_measured_is_nothing_to_fit(agent, tmp_path):
    ended = agent("fit", "--device", PROFILED, "--state-dir", tmp_path / "empty")
    assert ended.code == 2 and "no mode is measured yet; run `wattfleet agent profile`" in ended.err
