"""The contract of all predictors, and additional behaviour of some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from wattfleet.core.errors import CorruptReferenceError, InvalidInputError
from wattfleet.core.modes import FittedWorkload, Profile, WorkloadFacts, board_named, board_with_modes, read_profile
from wattfleet.core.prediction import (
    Prediction,
    Predictor,
    RooflinePredictor,
    pack_artefact,
    predictor_class,
    predictor_names,
    restore_predictor,
)
from wattfleet.evaluation.judging.sources import find_reference, references_of
from wattfleet.evaluation.judging.transfer import evaluate_transfer
from wattfleet.evaluation.powertrain import PowerTrainPredictor, Schedule, ScratchPredictor
from wattfleet.evaluation.regression.predictors import (
    BoostingPredictor,
    ForestPredictor,
    LinearPredictor,
    Regression,
    TreePredictor,
)

SPACE = board_named("agx-orin").space.array()

Fit = Callable[..., Predictor]


def formula(modes: np.ndarray, seed: int, slower: float = 1.0) -> Profile:
    """Measurements from a formula that no predictor models, with 1 % noise."""
    cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    time = slower * (80 / (cpu * np.minimum(cores, 4)) + 60 / gpu + 20 / mem)
    power = 6000 + 900 * cores * cpu**1.5 + 9000 * gpu**1.5 + 900 * mem
    noise = np.exp(0.01 * np.random.default_rng(seed).standard_normal((2, len(modes))))
    return Profile(modes, time * noise[0], power * noise[1])


def drawn(count: int, seed: int) -> np.ndarray:
    return SPACE[np.random.default_rng(seed).choice(len(SPACE), count, replace=False)]


def columns(prediction: Prediction) -> list[np.ndarray]:
    return [getattr(prediction, field.name) for field in fields(prediction)]


def assert_sound(prediction: Prediction, count: int) -> None:
    for values in columns(prediction):
        assert values.shape == (count,)
        assert np.isfinite(values).all()
        assert (values > 0).all()


class PredictorContract:
    """The contract; `tolerance` is the relative difference allowed between fits to reordered rows."""

    name: str
    tolerance: float

    @classmethod
    def fit(cls) -> Fit:
        """The `fit` of the class; networks use fewer steps than in the paper."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Predictor:
        return cls.fit()(formula(drawn(420, 0), 0))

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls, reference: Predictor) -> Predictor:
        return cls.fit()(formula(drawn(20, 1), 1, slower=1.5), reference)

    def test_is_registered_under_its_name(self, fitted: Predictor) -> None:
        assert fitted.name == self.name
        assert predictor_class(self.name) is type(fitted)

    def test_is_positive_and_finite_in_the_whole_space(self, fitted: Predictor, reference: Predictor) -> None:
        assert len(SPACE) == 18_096
        assert_sound(fitted.predict(SPACE), len(SPACE))
        assert_sound(reference.predict(SPACE), len(SPACE))

    def test_is_positive_and_finite_far_outside_the_profiled_range(self, fitted: Predictor) -> None:
        beyond = np.array([[1, 50_000, 5e7, 5e7], [64, 5e6, 5e9, 1e10], [1, 5e6, 5e7, 1e10]])
        assert_sound(fitted.predict(beyond), 3)

    def test_predicts_an_empty_array_of_modes(self, fitted: Predictor) -> None:
        assert_sound(fitted.predict(SPACE[:0]), 0)

    def test_predicts_a_mode_the_same_alone_and_among_others(self, fitted: Predictor) -> None:
        alone = [fitted.predict(SPACE[k : k + 1]) for k in (0, 9_000)]
        among = fitted.predict(SPACE)
        for one, k in zip(alone, (0, 9_000), strict=True):
            for single, many in zip(columns(one), columns(among), strict=True):
                assert single[0] == pytest.approx(many[k], rel=1e-9)

    def test_fits_five_modes_and_refuses_four_without_a_reference(self, reference: Predictor) -> None:
        five = formula(drawn(5, 2), 2)
        assert_sound(self.fit()(five, reference).predict(SPACE), len(SPACE))
        assert_sound(self.fit()(five).predict(SPACE), len(SPACE))
        with pytest.raises(InvalidInputError, match="5"):
            self.fit()(five.rows(np.arange(4)))

    def test_the_same_profile_gives_the_same_bytes(self, fitted: Predictor, reference: Predictor) -> None:
        again = self.fit()(formula(drawn(20, 1), 1, slower=1.5), reference)
        assert again.save() == fitted.save()

    def test_the_order_of_a_corpus_does_not_matter(self, reference: Predictor) -> None:
        corpus = formula(drawn(420, 0), 0)
        turned = self.fit()(corpus.rows(np.random.default_rng(3).permutation(420)))
        for one, other in zip(columns(reference.predict(SPACE)), columns(turned.predict(SPACE)), strict=True):
            np.testing.assert_allclose(one, other, rtol=self.tolerance)

    def test_the_order_of_the_rows_does_not_matter(self, fitted: Predictor, reference: Predictor) -> None:
        profile = formula(drawn(20, 1), 1, slower=1.5)
        turned = self.fit()(profile.rows(np.random.default_rng(3).permutation(20)), reference)
        for one, other in zip(columns(fitted.predict(SPACE)), columns(turned.predict(SPACE)), strict=True):
            np.testing.assert_allclose(one, other, rtol=self.tolerance)

    def test_a_saved_predictor_predicts_the_same(self, fitted: Predictor) -> None:
        loaded = type(fitted).load(fitted.save())
        for one, other in zip(columns(fitted.predict(SPACE)), columns(loaded.predict(SPACE)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert loaded.save() == fitted.save()

    def test_an_artefact_restores_it(self, fitted: Predictor) -> None:
        artefact = pack_artefact(fitted, FittedWorkload("w", 16, 100), "agx-orin", {}, {})
        assert restore_predictor(artefact).save() == fitted.save()

    def test_accepts_facts_and_the_only_batch(self, reference: Predictor, fitted: Predictor) -> None:
        rows = formula(drawn(20, 1), 1, slower=1.5)
        sixteen = np.full(20, 16)
        stated = Profile(rows.modes, rows.minibatch_ms, rows.power_mw, sixteen)
        found = self.fit()(stated, reference, WorkloadFacts(batch=16, loader_workers=4))
        assert_sound(found.predict(rows.modes, sixteen), 20)
        for one, other in zip(
            columns(found.predict(rows.modes)), columns(found.predict(rows.modes, sixteen)), strict=True
        ):
            np.testing.assert_array_equal(one, other)

    def test_adapting_to_the_same_hardware_changes_nothing(self, reference: Predictor) -> None:
        hardware = board_named("agx-orin").hardware
        same = reference.adapted(hardware, hardware)
        for one, other in zip(columns(reference.predict(SPACE)), columns(same.predict(SPACE)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
        assert same.adapted(hardware, hardware).save() == same.save()

    def test_is_sound_when_adapted_to_other_hardware(self, reference: Predictor) -> None:
        adapted = reference.adapted(board_named("agx-orin").hardware, board_named("orin-nano").hardware)
        modes = board_named("orin-nano").space.array()
        assert_sound(adapted.predict(modes), len(modes))

    def test_refuses_weights_of_another_kind(self, fitted: Predictor) -> None:
        with pytest.raises(CorruptReferenceError):
            type(fitted).load(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")

    def test_predicts_the_fitted_modes_well(self, fitted: Predictor) -> None:
        profile = formula(drawn(20, 1), 1, slower=1.5)
        found = fitted.predict(profile.modes)
        assert np.median(np.abs(found.minibatch_ms / profile.minibatch_ms - 1)) < 0.35
        assert np.median(np.abs(found.power_mw / profile.power_mw - 1)) < 0.35


class OneBatch:
    """Tests of predictors that predict one batch size."""

    @classmethod
    def fit(cls) -> Fit:
        raise NotImplementedError

    def test_several_batches_are_refused(self, fitted: Predictor) -> None:
        rows = formula(drawn(8, 1), 1)
        batch = np.array([1, 16] * 4)
        several = Profile(rows.modes, rows.minibatch_ms, rows.power_mw, batch)
        with pytest.raises(InvalidInputError, match="predicts one batch size: the rows have the batches 1, 16; keep"):
            self.fit()(several)
        with pytest.raises(InvalidInputError, match="predicts one batch size"):
            fitted.predict(rows.modes, batch)


class FittedBatch(OneBatch):
    """Tests of predictors that predict only the batch size that they were fitted to."""

    def test_another_batch_than_the_fitted_one_is_refused(self) -> None:
        rows = formula(drawn(8, 1), 1)
        sixteen, thirty_two = np.full(8, 16), np.full(8, 32)
        stated = Profile(rows.modes, rows.minibatch_ms, rows.power_mw, sixteen)
        for found in (self.fit()(stated), self.fit()(rows, None, WorkloadFacts(batch=16))):
            for one in (found, type(found).load(found.save())):
                assert_sound(one.predict(rows.modes, sixteen), 8)
                with pytest.raises(InvalidInputError, match="was fitted to the batch 16, and cannot predict the batch"):
                    one.predict(rows.modes, thirty_two)


class TestRoofline(PredictorContract):
    name = "roofline"
    # Sums over reordered rows round differently, and the optimizer stops at slightly other parameters.
    tolerance = 1e-4

    @classmethod
    def fit(cls) -> Fit:
        return RooflinePredictor.fit

    @pytest.mark.data
    @pytest.mark.parametrize(
        ("target", "modes"),
        [
            ("agx_orin_mobilenetv3", 50),
            ("orin_nano_resnet18", 10),
            pytest.param("agx_orin_mobilenetv3", 10, marks=pytest.mark.slow),
            pytest.param("orin_nano_resnet18", 50, marks=pytest.mark.slow),
        ],
    )
    def test_the_90_percent_interval_holds_about_as_often(self, corpora: Path, target: str, modes: int) -> None:
        profile = read_profile(corpora / f"{target}.csv")
        source = find_reference("agx_orin_resnet18", profile)
        references = references_of([source], "roofline", board_with_modes(profile.modes))
        scores = evaluate_transfer(RooflinePredictor, references, profile, modes, 10, 0, lambda: 0.0)
        # The goal of 85 to 95 % is missed at 10 modes (docs/predicting.md): intervals are a little too wide or narrow.
        least, most = (80, 98) if modes == 10 else (85, 95)
        assert least <= scores.time_coverage.mean() <= most
        assert least <= scores.power_coverage.mean() <= most

    @pytest.mark.data
    def test_adapting_by_data_sheets_reduces_most_of_the_error(self, corpora: Path) -> None:
        import reference_models

        artefact, nano = reference_models.load("agx_orin_resnet18"), read_profile(corpora / "orin_nano_resnet18.csv")

        def errors_pct(reference: Predictor) -> tuple[float, float]:
            found = reference.predict(nano.modes)
            time, power = found.minibatch_ms / nano.minibatch_ms, found.power_mw / nano.power_mw
            return 100 * float(np.abs(time - 1).mean()), 100 * float(np.abs(power - 1).mean())

        for without, adapted in zip(
            errors_pct(restore_predictor(artefact)),
            errors_pct(restore_predictor(artefact, board_named("orin-nano"))),
            strict=True,
        ):
            assert without > 30
            assert adapted < 15


class Networks(FittedBatch, PredictorContract):
    # Rows are sorted before random draws, so their order has no effect.
    tolerance = 1e-12
    schedule = Schedule(epochs=40, entries=8, learning_rate=3e-3)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def torch(cls) -> None:
        pytest.importorskip("torch", reason="networks are trained with torch")


class TestPowerTrain(Networks):
    name = "powertrain"

    @classmethod
    def fit(cls) -> Fit:
        return partial(PowerTrainPredictor.fit, schedule=cls.schedule)

    def test_a_transfer_is_better_than_training_alone(self, reference: PowerTrainPredictor) -> None:
        fitted = self.fit()(formula(drawn(20, 1), 1, slower=1.5), reference)
        truth = formula(drawn(500, 4), 4, slower=1.5)
        alone = partial(ScratchPredictor.fit, schedule=self.schedule)(formula(drawn(20, 1), 1, slower=1.5))

        def error(predictor: Predictor) -> float:
            return float(np.abs(predictor.predict(truth.modes).minibatch_ms / truth.minibatch_ms - 1).mean())

        assert error(fitted) < error(alone)

    def test_another_boards_gpu_frequencies_change_the_loss(self, reference: PowerTrainPredictor) -> None:
        modes = drawn(10, 5)
        near = self.fit()(formula(modes, 5), reference)
        measured = formula(modes, 5)
        far = self.fit()(Profile(modes + [0, 0, 7.0, 0], measured.minibatch_ms, measured.power_mw), reference)
        assert not np.allclose(near.predict(modes).minibatch_ms, far.predict(modes).minibatch_ms, rtol=1e-3)


class TestScratch(Networks):
    name = "scratch"

    @classmethod
    def fit(cls) -> Fit:
        return partial(ScratchPredictor.fit, schedule=cls.schedule)

    def test_the_reference_has_no_effect(self, fitted: Predictor) -> None:
        alone = self.fit()(formula(drawn(20, 1), 1, slower=1.5))
        assert alone.save() == fitted.save()


class Regressions(FittedBatch, PredictorContract):
    """The baselines of scikit-learn, which transfer nothing."""

    kind: type[Regression]
    tolerance = 1e-9

    @classmethod
    def fit(cls) -> Fit:
        return cls.kind.fit

    def test_the_reference_has_no_effect(self, fitted: Predictor) -> None:
        alone = self.fit()(formula(drawn(20, 1), 1, slower=1.5))
        assert alone.save() == fitted.save()

    def test_the_90_percent_intervals_hold(self) -> None:
        held = []
        for seed in range(4):
            modes = drawn(160, 20 + seed)
            fitted = self.fit()(formula(modes[:40], seed))
            unseen = formula(modes[40:], seed + 50)
            predicted = fitted.predict(unseen.modes)
            low, high = (predicted.minibatch_ms_quantile(q) for q in (0.05, 0.95))
            held.append(((low <= unseen.minibatch_ms) & (unseen.minibatch_ms <= high)).mean())
        assert 0.8 <= np.mean(held) <= 0.99


class TestLinear(Regressions):
    name = "linear"
    kind = LinearPredictor

    def test_recovers_a_product_of_powers_of_the_knobs(self) -> None:
        modes = drawn(60, 0)
        cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
        values = 50 * cores**-0.3 * cpu**-0.5 * gpu**-0.7, 9000 * cpu**0.4 * mem**0.2
        fitted = LinearPredictor.fit(Profile(modes[:30], values[0][:30], values[1][:30]))
        predicted = fitted.predict(modes[30:])
        np.testing.assert_allclose(predicted.minibatch_ms, values[0][30:], rtol=1e-3)
        np.testing.assert_allclose(predicted.power_mw, values[1][30:], rtol=1e-3)


class TestTree(Regressions):
    name = "tree"
    kind = TreePredictor


class Ensembles(Regressions):
    """Those of many trees: 25 of them instead of 100."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def fewer_trees(cls) -> Iterator[None]:
        full = cls.kind.unfitted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cls.kind, "unfitted", lambda: full().set_params(n_estimators=25))
            yield


class TestForest(Ensembles):
    name = "forest"
    kind = ForestPredictor


class TestBoosting(Ensembles):
    name = "boosting"
    kind = BoostingPredictor


@pytest.mark.parametrize("kind", [PowerTrainPredictor, ScratchPredictor])
@pytest.mark.slow
def test_networks_fitted_together_are_those_fitted_alone(
    kind: type[PowerTrainPredictor] | type[ScratchPredictor],
) -> None:
    profiles = [formula(drawn(12, seed), seed, slower=1 + seed) for seed in range(3)]
    together = kind.fit_all(profiles, schedule=Networks.schedule)
    for profile, fitted in zip(profiles, together, strict=True):
        alone = kind.fit(profile, schedule=Networks.schedule).predict(SPACE)
        for one, other in zip(columns(alone), columns(fitted.predict(SPACE)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4)


def test_every_kind_has_a_suite() -> None:
    suites = (TestRoofline, TestPowerTrain, TestScratch, TestLinear, TestTree, TestForest, TestBoosting)
    assert set(predictor_names()) == {suite.name for suite in suites}
