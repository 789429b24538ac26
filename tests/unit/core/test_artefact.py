"""Artefacts and stored weights are read back unchanged, and damaged or foreign ones are refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from wattfleet.core.choosing import spread_modes
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.core.modes import BOARDS, FittedWorkload, Profile, Task, WorkloadFacts
from wattfleet.core.prediction import (
    Artefact,
    Prediction,
    Predictor,
    RooflinePredictor,
    pack_artefact,
    predictor_class,
    predictor_names,
    read_artefact,
    restore_predictor,
    write_artefact,
)
from wattfleet.core.prediction.artefact import verify_artefact
from wattfleet.core.prediction.roofline import (
    Member,
    Population,
    PowerParameters,
    TimeParameters,
    power_mw,
    settings_of,
    step_time_ms,
)
from wattfleet.core.prediction.roofline.estimation import Surface
from wattfleet.core.prediction.roofline.population import Estimate
from wattfleet.evaluation.powertrain import (
    NEURONS,
    DenseNetwork,
    NetworkQuantity,
    PowerTrainPredictor,
    ScratchPredictor,
)
from wattfleet.evaluation.regression.predictors import (
    BoostingPredictor,
    ForestPredictor,
    LinearPredictor,
    Regression,
    TreePredictor,
)

# --- Artefact ---------------------------------------------------------------------------------------------------------
# Artefacts are read back unchanged, and damaged or foreign files are refused.


WORKLOAD = FittedWorkload("resnet18-imagenet", 16, 3125)
MODES = np.array([[4, 1e6 + 1e5 * k, 3e8 + 1e8 * (k % 4), 2.133e9] for k in range(8)])
PREDICTOR = RooflinePredictor.fit(Profile(MODES, 900 - 50.0 * np.arange(8), 9e3 + 1e3 * np.arange(8)))


def made(figure: float = 1.5) -> Artefact:
    return pack_artefact(PREDICTOR, WORKLOAD, "orin-nano", {"measurements": "made up"}, {"held_out": {"time": figure}})


ARTEFACT = made()


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(ARTEFACT.manifest), **changes}).encode()


def test_a_written_artefact_is_read_back_unchanged(tmp_path: Path) -> None:
    write_artefact(ARTEFACT, tmp_path / "models" / "nano", card="# nano\n")
    back = read_artefact(tmp_path / "models" / "nano")
    assert back == ARTEFACT
    assert back.details.workload == WORKLOAD
    assert back.details.board == "orin-nano"
    assert back.details.provenance == {"measurements": "made up"}
    assert back.details.figures == {"held_out": {"time": 1.5}}
    np.testing.assert_array_equal(restore_predictor(back).predict(MODES).power_mw, PREDICTOR.predict(MODES).power_mw)
    assert (tmp_path / "models" / "nano" / "MODEL_CARD.md").read_text() == "# nano\n"


def test_a_manifest_carries_the_facts_that_are_known(tmp_path: Path) -> None:
    facts = WorkloadFacts(Task.INFERENCE, batch=16, loader_workers=0, step_flops=8.7e10)
    write_artefact(pack_artefact(PREDICTOR, WORKLOAD, "orin-nano", {}, {}, facts), tmp_path / "nano")
    assert read_artefact(tmp_path / "nano").details.facts == facts
    assert json.loads((tmp_path / "nano" / "manifest.json").read_text())["facts"] == {
        "task": "inference",
        "batch": 16,
        "loader_workers": 0,
        "processor": "gpu",
        "step_flops": 8.7e10,
    }


def test_a_manifest_of_before_states_no_facts() -> None:
    assert "facts" not in json.loads(ARTEFACT.manifest)
    assert ARTEFACT.details.facts is None


@pytest.mark.parametrize(
    ("facts", "defect"),
    [
        ({"step_flops": -1}, "step_flops must be a finite number above 0"),
        ({"batch": 0}, "batch must be a whole number"),
        ({"task": "sleeping"}, "task is 'sleeping'"),
        ({"colour": "red"}, "unexpected keyword"),
        (["training"], "must be a mapping"),
    ],
)
def test_impossible_facts_of_a_manifest_are_refused(facts: object, defect: str) -> None:
    with pytest.raises(CorruptReferenceError, match=f"manifest.json is damaged .*{defect}"):
        Artefact(changed(facts=facts), ARTEFACT.weights)


def test_the_digest_is_the_manifests_and_the_manifest_pins_the_weights() -> None:
    assert ARTEFACT.digest == hashlib.sha256(ARTEFACT.manifest).hexdigest()
    pinned = json.loads(ARTEFACT.manifest)["files"]["weights.safetensors"]
    assert pinned == {"sha256": hashlib.sha256(ARTEFACT.weights).hexdigest(), "size": len(ARTEFACT.weights)}


def test_the_digest_depends_on_the_predictor_and_its_details() -> None:
    assert made().digest == ARTEFACT.digest
    assert made(1.6).digest != ARTEFACT.digest


def test_figures_that_are_not_numbers_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        made(float("nan"))


@given(position=st.integers(0, len(ARTEFACT.weights) - 1), flipped=st.integers(1, 255))
def test_any_changed_byte_of_the_weights_is_detected(position: int, flipped: int) -> None:
    weights = bytearray(ARTEFACT.weights)
    weights[position] ^= flipped
    with pytest.raises(CorruptReferenceError, match=r"has the SHA-256 .* instead of .*: fetch the reference again"):
        verify_artefact(ARTEFACT.manifest, bytes(weights))


@given(position=st.integers(0, len(ARTEFACT.manifest) - 1), flipped=st.integers(1, 255))
def test_a_changed_byte_of_the_manifest_is_refused_or_changes_the_digest(position: int, flipped: int) -> None:
    manifest = bytearray(ARTEFACT.manifest)
    manifest[position] ^= flipped
    try:
        assert Artefact(bytes(manifest), ARTEFACT.weights).digest != ARTEFACT.digest
    except WattfleetError:
        pass


@pytest.mark.parametrize("weights", [ARTEFACT.weights[:-1], b""])
def test_truncated_weights_are_refused(weights: bytes) -> None:
    with pytest.raises(CorruptReferenceError, match=rf"has {len(weights)} bytes instead of {len(ARTEFACT.weights)}"):
        Artefact(ARTEFACT.manifest, weights)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        ARTEFACT.manifest[:-20],
        changed(files={}),
        changed(files={"weights.safetensors": {"sha256": "0", "size": None}}),
        changed(files={"weights.safetensors": {"sha256": "0", "size": float("inf")}}),
        changed(workload={"name": "x"}),
        changed(workload={"name": "x", "minibatch": 0, "minibatches_per_epoch": 1}),
        changed(workload={"name": "x", "minibatch": "16", "minibatches_per_epoch": 1}),
        changed(workload={"name": "x", "minibatch": 2**64, "minibatches_per_epoch": 1}),
        changed(workload={"name": "x", "minibatch": 1_000_001, "minibatches_per_epoch": 1}),
        changed(workload={"name": "x", "minibatch": 16.5, "minibatches_per_epoch": 1}),
        changed(workload={"name": "x", "minibatch": True, "minibatches_per_epoch": 1}),
        changed(workload={"name": "x", "minibatch": 16, "minibatches_per_epoch": 1.5}),
        changed(workload={"name": 3, "minibatch": 16, "minibatches_per_epoch": 1}),
        changed(provenance=3),
    ],
)
def test_damaged_manifests_are_refused(manifest: bytes) -> None:
    with pytest.raises(CorruptReferenceError, match="manifest.json is damaged .* fetch the reference again"):
        Artefact(manifest, ARTEFACT.weights)


@given(
    st.dictionaries(
        st.sampled_from(["format_version", "predictor", "workload", "board", "provenance", "figures", "files"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["name", "sha256", "size"]), inner),
            max_leaves=6,
        ),
    )
)
def test_arbitrary_manifests_raise_only_wattfleet_errors(content: dict[str, Any]) -> None:
    with pytest.raises(WattfleetError):
        Artefact(json.dumps({"format_version": 1, "files": {}, **content}).encode(), ARTEFACT.weights)


@pytest.mark.parametrize("version", [0, 2, "1.0", None])
def test_another_format_is_refused_with_a_remedy(version: object) -> None:
    with pytest.raises(InvalidInputError, match="install the version that wrote it, or train the reference again"):
        Artefact(changed(format_version=version), ARTEFACT.weights)


def test_an_unknown_kind_of_predictor_is_refused_with_a_remedy() -> None:
    with pytest.raises(
        InvalidInputError, match="unknown predictor 'oracle': installed are roofline, .* Install the version of"
    ):
        restore_predictor(Artefact(changed(predictor="oracle"), ARTEFACT.weights))


def test_another_kind_of_predictor_can_be_packed() -> None:
    class Constant:
        name = "constant"

        def predict(self, modes: np.ndarray[Any, np.dtype[np.float64]]) -> Prediction:
            raise NotImplementedError

        def save(self) -> bytes:
            return b"1"

    assert pack_artefact(Constant(), WORKLOAD, "orin-nano", {}, {}).details.predictor == "constant"


def test_a_directory_that_is_missing_or_lacks_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such directory"):
        read_artefact(tmp_path / "nowhere")
    write_artefact(ARTEFACT, tmp_path / "nano")
    (tmp_path / "nano" / "weights.safetensors").unlink()
    with pytest.raises(CorruptReferenceError, match="weights.safetensors; fetch the reference again"):
        read_artefact(tmp_path / "nano")


def test_a_damaged_directory_is_named(tmp_path: Path) -> None:
    write_artefact(ARTEFACT, tmp_path / "nano")
    (tmp_path / "nano" / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptReferenceError, match="nano: weights.safetensors has 5 bytes"):
        read_artefact(tmp_path / "nano")


def test_an_older_artefact_is_replaced_completely(tmp_path: Path) -> None:
    write_artefact(ARTEFACT, tmp_path / "nano", card="old")
    newer = made(9.0)
    write_artefact(newer, tmp_path / "nano")
    assert read_artefact(tmp_path / "nano") == newer
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "manifest.json",
        "weights.safetensors",
    ]


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidInputError, match="'thesis.tex', which is not part of a reference"):
        write_artefact(ARTEFACT, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInputError, match="cannot be written"):
            write_artefact(ARTEFACT, place)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_write_keeps_the_older_artefact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    write_artefact(ARTEFACT, tmp_path / "nano")
    moves = 0
    really = os.replace

    def replace(source: Path, target: Path) -> None:
        nonlocal moves
        moves += 1
        if moves == failing:
            raise OSError(28, "No space left on device")
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(InvalidInputError, match="No space left"):
        write_artefact(made(9.0), tmp_path / "nano")
    assert read_artefact(tmp_path / "nano") == ARTEFACT
    assert [path.name for path in tmp_path.iterdir()] == ["nano"]


def test_a_missing_key_of_a_manifest_is_named() -> None:
    for key in ("format_version", "board"):
        content = {name: value for name, value in json.loads(ARTEFACT.manifest).items() if name != key}
        with pytest.raises(CorruptReferenceError, match=rf"manifest.json is damaged \(it lacks '{key}'\)"):
            verify_artefact(json.dumps(content).encode(), ARTEFACT.weights)


# --- Tensors ----------------------------------------------------------------------------------------------------------
# Stored weights are read back unchanged, and damaged ones are refused.

SPACE = BOARDS["orin-nano"].space.array()
TIME = TimeParameters(270, 80, 16, 46, 7, 122, 3, 4, 1, 0.2, 1.9, 0.3, 6)
POWER = PowerParameters(6000, 20, 240, 650, 8300, 1100, 400, 6000, 400, 1.7, 1.2, 1.4, 0.4)


def profile_of(count: int) -> Profile:
    modes = spread_modes(SPACE, count, 0)
    settings = settings_of(modes, None)
    return Profile(modes, step_time_ms(TIME, settings), power_mw(POWER, TIME, settings))


def fitted(count: int) -> RooflinePredictor:
    return RooflinePredictor.fit(profile_of(count))


@pytest.fixture(scope="module")
def few() -> RooflinePredictor:
    return fitted(8)


@pytest.mark.parametrize("count", [8, 450])
def test_a_saved_predictor_predicts_bit_identically(count: int) -> None:
    predictor = fitted(count)
    restored = RooflinePredictor.load(predictor.save())
    before, after = predictor.predict(SPACE), restored.predict(SPACE)
    np.testing.assert_array_equal(after.minibatch_ms, before.minibatch_ms)
    np.testing.assert_array_equal(after.power_mw, before.power_mw)
    np.testing.assert_array_equal(after.time_log_sd, before.time_log_sd)
    np.testing.assert_array_equal(after.power_log_sd, before.power_log_sd)
    assert restored.save() == predictor.save()


@pytest.mark.parametrize("weights", [b"", b"\x00" * 100, b"\x80\x04\x95pickle", b"{}" * 50])
def test_bytes_in_another_format_are_refused(weights: bytes) -> None:
    with pytest.raises(CorruptReferenceError, match="not in safetensors format"):
        RooflinePredictor.load(weights)


def test_truncated_weights_of_a_predictor_are_refused(few: RooflinePredictor) -> None:
    with pytest.raises(CorruptReferenceError, match="fetch the reference again"):
        RooflinePredictor.load(few.save()[:-8])


def quantity() -> NetworkQuantity:
    """An untrained network with the parameters of one quantity."""
    rng, sizes = np.random.default_rng(0), (4, *NEURONS)
    weights = tuple(rng.normal(0, 0.1, (n, m)) for m, n in itertools.pairwise(sizes))
    network = DenseNetwork(SPACE.mean(0), SPACE.std(0), weights, tuple(np.zeros(n) for n in NEURONS))
    return NetworkQuantity(network, 10.0, 0.1)


def estimate(mean: np.ndarray, seed: int) -> Estimate:
    root = np.random.default_rng(seed).normal(size=(len(mean), len(mean)))
    where = settings_of(SPACE[:3], np.array([1, 8, 64]))
    return Estimate(mean, root @ root.T, Surface(where, np.array([0.01, -0.02, 0.03])))


def with_everything() -> RooflinePredictor:
    """A predictor that has two hypotheses and a population of two workloads on two boards."""
    boards = (BOARDS["agx-orin"].hardware, BOARDS["orin-nano"].hardware)
    members = tuple(
        Member(WorkloadFacts(task, loader_workers=workers), board, estimate(TIME.log(), 1), estimate(POWER.log(), 2))
        for task, workers, board in zip(Task, (4, 0), boards, strict=True)
    )
    reference = replace(fitted(8), hardware=boards[1], population=Population(members))
    found = RooflinePredictor.fit(profile_of(8), reference)
    halves = tuple(replace(found.likeliest, probability=each) for each in (0.75, 0.25))
    return replace(found, hypotheses=halves, population=reference.population)


def with_few_trees(kind: type[Regression]) -> Regression:
    """An ensemble of five trees instead of a hundred."""
    full = kind.unfitted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "unfitted", lambda: full().set_params(n_estimators=5))
        return kind.fit(profile_of(8))


@cache
def stored(kind: str) -> bytes:
    """A stored predictor of the given kind."""
    made: dict[str, Callable[[], Predictor]] = {
        "roofline": with_everything,
        "powertrain": lambda: PowerTrainPredictor(quantity(), quantity(), np.unique(SPACE[:, 2])),
        "scratch": lambda: ScratchPredictor(quantity(), quantity()),
        "linear": lambda: LinearPredictor.fit(profile_of(8)),
        "tree": lambda: TreePredictor.fit(profile_of(8)),
        "forest": lambda: with_few_trees(ForestPredictor),
        "boosting": lambda: with_few_trees(BoostingPredictor),
    }
    return made[kind]().save()


def load_as(kind: str, tensors: dict[str, np.ndarray]) -> Predictor:
    return predictor_class(kind).load(save(tensors))


def damages(values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays that must not be accepted in place of this one, and what is wrong with each."""
    yield "another type", values.astype(np.float32)
    yield "one number", np.array(1.0)
    yield "another shape", np.ones((7, 7, 7))
    yield "not finite", np.full_like(values, np.nan) if values.size else np.array([np.inf])
    for number in (1e308, -1e308, 1e14) if values.size else ():
        extreme = values.copy()
        extreme.flat[0] = number
        yield f"{number:g}", extreme


@pytest.mark.parametrize("kind", predictor_names())
def test_every_array_is_needed_and_of_one_shape_type_and_range(kind: str) -> None:
    tensors = load(stored(kind))
    load_as(kind, tensors)
    for name in tensors:
        with pytest.raises(CorruptReferenceError):
            load_as(kind, {key: values for key, values in tensors.items() if key != name})
            pytest.fail(f"{name} may be missing")
        for what, wrong in damages(tensors[name]):
            with pytest.raises(CorruptReferenceError):
                load_as(kind, {**tensors, name: wrong})
                pytest.fail(f"{name} may have {what}")


@pytest.mark.parametrize("value", [-1.0, 0.0, 1e-300])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("roofline", "0.time"),
        ("roofline", "0.power"),
        ("roofline", "0.time_remainder.settings"),
        ("roofline", "0.power_remainder.measurement_var"),
        ("powertrain", "gpu_hz"),
        ("powertrain", "time.scale"),
        ("scratch", "power.floor_and_log_sd"),
        ("forest", "power_mw"),
    ],
)
def test_parameters_that_are_not_positive_are_refused(kind: str, name: str, value: float) -> None:
    tensors = load(stored(kind))
    tensors[name].flat[0] = value
    with pytest.raises(CorruptReferenceError):
        load_as(kind, tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("0.time_remainder.process", -1.0),
        ("0.power_remainder.prior_root", 31.0),
        ("0.power_remainder.prior_root", -1.0),
        ("0.time_remainder.share", 31.0),
        ("0.time_remainder.gpu_share", 31.0),
        ("0.time_remainder.interval_scale", -1.0),
    ],
)
def test_logarithms_out_of_range_are_refused(name: str, value: float) -> None:
    tensors = load(stored("roofline"))
    tensors[name].flat[0] = value
    with pytest.raises(CorruptReferenceError):
        load_as("roofline", tensors)


@pytest.mark.parametrize("value", [1e12, -1e12])
def test_a_reference_whose_predictions_overflow_is_not_restored(value: float) -> None:
    tensors = load(stored("roofline"))
    tensors["0.time_remainder.weights"][:] = value
    predictor = RooflinePredictor.load(save(tensors))
    artefact = pack_artefact(predictor, FittedWorkload("w", 16, 100), "orin-nano", {}, {})
    with pytest.raises(CorruptReferenceError, match="not finite and positive"):
        restore_predictor(artefact)


def test_hypotheses_and_population_are_read_back() -> None:
    before = with_everything()
    after = RooflinePredictor.load(before.save())
    assert after.save() == before.save()
    assert [each.probability for each in after.hypotheses] == [0.75, 0.25]
    assert after.hardware == BOARDS["orin-nano"].hardware
    assert before.population and after.population
    assert [(m.facts, m.hardware) for m in after.population.members] == [
        (WorkloadFacts(Task.TRAINING, loader_workers=4), BOARDS["agx-orin"].hardware),
        (WorkloadFacts(Task.INFERENCE, loader_workers=0), BOARDS["orin-nano"].hardware),
    ]
    # A transfer from the restored predictor gives the same result.
    ten = profile_of(10)
    assert RooflinePredictor.fit(ten, after).save() == RooflinePredictor.fit(ten, before).save()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("probabilities", [0.75, 0.75]),
        ("probabilities", [1.5, -0.5]),
        ("probabilities", [1 / 9] * 9),
        ("batch", [2.5]),
        ("batch", [-1.0]),
        ("batch", [1e7]),
        ("hardware", [0.5, 128.0, 7.0]),
        ("hardware", [1024.0, -128.0, 7.0]),
        ("hardware", [1024.0, 128.0, 0.0]),
        ("members", [1.5]),
        ("members", [-1.0]),
        ("members", [3.0]),
        ("members", [65.0]),
        ("member.0.facts", [2.0, 4.0]),
        ("member.0.facts", [0.0, 1.5]),
        ("member.0.facts", [0.0, -1.0]),
        ("member.1.hardware", [0.0, 128.0, 7.0]),
    ],
)
def test_facts_that_cannot_be_are_refused(name: str, values: list[float]) -> None:
    tensors = load(stored("roofline"))
    tensors[name] = np.array(values)
    with pytest.raises(CorruptReferenceError, match="fetch the reference again"):
        load_as("roofline", tensors)


@pytest.mark.parametrize("quantity", ["time", "power"])
def test_information_that_is_no_inverse_covariance_is_refused(quantity: str) -> None:
    name = f"member.1.{quantity}.information"
    lopsided, negative = load(stored("roofline")), load(stored("roofline"))
    lopsided[name][0, 1] += 1.0
    negative[name] = -negative[name]
    for tensors in (lopsided, negative):
        with pytest.raises(CorruptReferenceError, match="not a mean with its information"):
            load_as("roofline", tensors)


def test_more_batch_sizes_than_a_corpus_has_are_refused() -> None:
    tensors = load(stored("roofline"))
    tensors["0.time_remainder.known_batches"] = np.arange(1.0, 1002.0)
    with pytest.raises(CorruptReferenceError, match="1,001 batch sizes"):
        load_as("roofline", tensors)
