"""Measure how the dropout rate, which PowerTrain's paper does not state, changes the modes that its networks choose."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from reference_models.training import percentage_errors
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import Profile, read_profile
from wattfleet.core.prediction import Predictor
from wattfleet.evaluation.judging.choices import evaluate_choice
from wattfleet.evaluation.methods import RandomThenPredict
from wattfleet.evaluation.powertrain import PowerTrainPredictor, Schedule

REFERENCE, TARGET = "agx_orin_resnet18", "agx_orin_mobilenetv3"
BUDGETS_W = range(17, 51)


@dataclass(frozen=True)
class DropoutScores:
    """The scores of one dropout rate: errors are medians over draws, choices are judged over all draws and budgets.

    Attributes:
        dropout: the rate.
        reference_time_mape: error of the reference network on its own corpus, %.
        reference_power_mape: the same for power.
        time_mape: error of the tuned network on all modes of the target, %.
        power_mape: the same for power.
        signed_penalty_pct: median time penalty, negative for modes that are over the budget and faster.
        over_budget_pct: share of the cases over the budget (A/L).
        over_budget_1w_pct: share of the cases over the budget by more than 1 W (A/L + 1).
        excess_w: mean excess, W (the area).
        penalty_by_draw_pct: the median time penalty of each draw.
    """

    dropout: float
    reference_time_mape: float
    reference_power_mape: float
    time_mape: float
    power_mape: float
    signed_penalty_pct: float
    over_budget_pct: float
    over_budget_1w_pct: float
    excess_w: float
    penalty_by_draw_pct: list[float]


def measure(
    corpus: Profile, target: Profile, rates: Iterable[float], modes: int, draws: int, epochs: int
) -> Iterator[DropoutScores]:
    """Train the reference and tune it to `draws` draws of `modes` modes, for each rate."""
    drawn = [target.rows(np.random.default_rng(k).permutation(len(target))[:modes]) for k in range(draws)]
    for rate in rates:
        schedule = Schedule(dropout=rate, epochs=epochs)
        reference = PowerTrainPredictor.fit(corpus, schedule=schedule)
        tuned = PowerTrainPredictor.fit_all(drawn, reference, schedule=schedule)
        by_rows: dict[str, Predictor] = {
            profile.sha256(): predictor for profile, predictor in zip(drawn, tuned, strict=True)
        }
        # The method repeats the draws with the same seeds.
        method = RandomThenPredict("powertrain", partial(_looked_up, by_rows))
        cases = evaluate_choice(target, method, modes, [float(watts) for watts in BUDGETS_W], draws, seed=0)
        own = [float(error.mean()) for error in percentage_errors(reference.predict(corpus.modes), corpus)]
        errors = [[error.mean() for error in percentage_errors(one.predict(target.modes), target)] for one in tuned]
        time_mape, power_mape = np.median(errors, axis=0).tolist()
        yield DropoutScores(
            dropout=rate,
            reference_time_mape=own[0],
            reference_power_mape=own[1],
            time_mape=time_mape,
            power_mape=power_mape,
            signed_penalty_pct=float(np.median(cases.signed_penalty_pct)),
            over_budget_pct=100 * float((cases.excess_w > 0).mean()),
            over_budget_1w_pct=100 * float((cases.excess_w > 1).mean()),
            excess_w=float(cases.excess_w.mean()),
            penalty_by_draw_pct=np.median(cases.signed_penalty_pct, axis=1).tolist(),
        )


def _looked_up(by_rows: dict[str, Predictor], profile: Profile) -> Predictor:
    return by_rows[profile.sha256()]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_choices",
        description="Score PowerTrain's choices for several dropout rates.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="read the measured corpora from this folder"
    )
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.2, 0.3, 0.4, 0.5], help="set the rates")
    parser.add_argument("--modes", type=int, default=50, help="set the number of modes that are fitted")
    parser.add_argument("--draws", type=int, default=10, help="set how often the modes are drawn")
    parser.add_argument("--epochs", type=int, default=100, help="set the epochs of each training")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if not all(0 <= rate < 1 for rate in arguments.dropout):
        parser.error("--dropout must be 0 or more, and less than 1")
    if arguments.draws < 1 or arguments.epochs < 1:
        parser.error("--draws and --epochs must be 1 or more")
    try:
        corpus, target = (read_profile(arguments.data / f"{name}.csv") for name in (REFERENCE, TARGET))
        scores = measure(corpus, target, arguments.dropout, arguments.modes, arguments.draws, arguments.epochs)
        for score in scores:
            values = asdict(score)
            if arguments.json:
                print(json.dumps(values), flush=True)
                continue
            draws = " ".join(f"{penalty:.1f}" for penalty in values.pop("penalty_by_draw_pct"))
            print("  ".join(f"{name} {value:.3g}" for name, value in values.items()), f" by draw: {draws}", flush=True)
    except WattfleetError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
