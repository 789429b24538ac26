"""Artefacts are read back unchanged, and damaged or foreign files are refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattfleet.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.modes import FittedWorkload, Profile, Task, WorkloadFacts
from wattfleet.prediction import (
    Artefact,
    Prediction,
    RooflinePredictor,
    pack_artefact,
    read_artefact,
    restore_predictor,
    write_artefact,
)
from wattfleet.prediction.artefact import verify_artefact

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
