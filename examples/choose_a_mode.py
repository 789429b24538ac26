"""Choose the fastest power mode of a board under a power budget, from a CSV file of a few measured modes.

A reference predictor that ships with Wattfleet is transferred to the board with these modes. The file beside this
example holds twelve modes of a simulated Orin Nano; replace it, the kind of board and the budget with your own.
"""

from pathlib import Path

import reference_models
from wattfleet.core.choosing import KnownModes, fastest_within_budget, predicted_front
from wattfleet.core.modes import board_named, read_profile
from wattfleet.core.prediction import restore_predictor

board = board_named("orin-nano")
modes = board.space.array()
measured = read_profile(Path(__file__).with_name("orin_nano_simulated.csv"))
reference = restore_predictor(reference_models.load("agx_orin_resnet18"), board)
predictor = type(reference).fit(measured, reference)
prediction = predictor.predict(modes)
front = predicted_front(modes, prediction, minibatches_per_epoch=500)
choice = fastest_within_budget(KnownModes.of(modes, prediction, measured), budget_mw=15_000)
print(f"front: {len(front)} modes, {front.epoch_s[0]:.0f} to {front.epoch_s[-1]:.0f} s per epoch")
print(f"under 15 W: {choice.mode.label()}, {choice.minibatch_ms:.0f} ms per minibatch, {choice.power_mw / 1e3:.1f} W")
