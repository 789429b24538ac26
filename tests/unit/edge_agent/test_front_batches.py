"""Table and JSON output of fronts whose points differ in batch size, and references of another task."""

import numpy as np
import pytest

import reference_models
from edge_agent.cli import front as front_command
from edge_agent.cli.front_plots.view import FrontView
from edge_agent.learning.transfer import Transfer, UnusableReferenceError
from edge_agent.profiling.journal import JournalHeader
from tests.fakes.fronts import front
from wattfleet.choosing import Front
from wattfleet.modes import Task, WorkloadFacts
from wattfleet.prediction import pack_artefact, restore_predictor

SHIPPED = reference_models.load("agx_orin_resnet18")
HEADER = JournalHeader("jetson-07", "agx-orin", "hardware", "resnet18-imagenet", 16)


def view(batch):
    two = front((1.0, 20.0), (2.0, 10.0))
    points = Front(two.modes, two.epoch_s, two.power_w, two.epoch_log_sd, two.power_log_sd, two.warmup_s, batch)
    predicted = (points.warmup_s, points.epoch_s, points.power_w, points.epoch_log_sd, points.power_log_sd)
    nothing_measured = (np.empty((0, 4)), *np.empty((3, 0)))
    return FrontView("orin-0", points, np.zeros(2, dtype=bool), *predicted, *nothing_measured, 100, False)


def test_json_has_the_batch_only_where_it_differs():
    assert [point["batch"] for point in view(np.array([4, 1])).content()["front"]] == [4, 1]
    assert all("batch" not in point for point in view(None).content()["front"])


@pytest.mark.parametrize(("batch", "shown"), [(np.array([4, 1]), True), (None, False), (np.array([4, 4]), False)])
def test_the_table_has_a_batch_column_where_there_are_several(capsys, batch, shown):
    front_command._print(view(batch))  # noqa: SLF001
    assert ("batch" in capsys.readouterr().out) is shown


def packed(facts):
    details = SHIPPED.details
    return pack_artefact(restore_predictor(SHIPPED), details.workload, details.board, {}, {}, facts)


def test_a_reference_of_inference_is_refused_for_training():
    with pytest.raises(UnusableReferenceError, match="is for inference, but this device trains: choose a reference"):
        Transfer((packed(WorkloadFacts(Task.INFERENCE)),), HEADER, 100).priors()
    Transfer((packed(WorkloadFacts(batch=16)),), HEADER, 100).priors()
    Transfer((SHIPPED,), HEADER, 100).priors()


def test_a_fitted_predictor_keeps_what_was_known():
    transfer = Transfer((SHIPPED,), HEADER, 100, WorkloadFacts(loader_workers=0))
    fitted = transfer.packed(transfer.priors()[0], 5)
    assert fitted.details.facts == WorkloadFacts(batch=16, loader_workers=0)
