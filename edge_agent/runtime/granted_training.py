"""A training within the watts of its grant, also if its app trains other minibatches than were planned."""

from __future__ import annotations

import logging

from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.session.held_grant import Grant
from edge_agent.training.training import TrainingWatch
from wattfleet.errors import WattfleetError
from wattfleet_proto.v1 import local_pb2

_log = logging.getLogger(__name__)


class GrantedTraining:
    """One training, from its start.

    Its methods touch the device, and may take seconds: call them in a thread.

    Attributes:
        learner: of the workload that is trained.
        is_refitted: whether the predictor was fitted to what the app's loader has told, so that there is another front.
    """

    def __init__(self, watch: TrainingWatch, learner: OnlineLearner, grant: Grant, epochs: float) -> None:
        """Apply the mode of a grant and begin to observe.

        Args:
            watch: runs the training.
            learner: of the workload that is trained.
            grant: allows the training, in a mode that keeps within it.
            epochs: local epochs to train.

        Raises:
            InvalidInputError: the number of epochs is out of range.
            ModeNotAppliedError: the mode could not be applied.
        """
        assert grant.mode is not None, "a grant without a mode begins no training"
        watch.start(learner, grant.mode, epochs, grant.power_limit_w)
        self.learner = learner
        self.is_refitted = False
        self._watch = watch
        self._power_limit_w = grant.power_limit_w
        # The coordinator plans with the front of this prediction, until it has the next one.
        self._planned = learner.prediction

    def loader_seen(self, loader: local_pb2.LoaderSeen) -> str | None:
        """Take what the app's loader tells of itself.

        If its minibatches are others than those that the predictor knows, the predictor is fitted to them. If they draw
        more than was planned and may exceed the grant, the training continues in a lower mode.

        Returns:
            Why the training has to stop, as no mode keeps within the grant: the device is parked. None if it goes on.

        Raises:
            InvalidInputError: a number is out of range.
            ModeNotAppliedError: the lower mode could not be applied, or the device could not be parked.
        """
        told = (
            getattr(loader, name) if loader.HasField(name) else None
            for name in ("batch", "loader_workers", "minibatches_per_epoch")
        )
        with self._watch.loader_seen(self.learner.loader_seen(*told)):
            return self._keep_within_grant()

    def continue_under(self, grant: Grant) -> str | None:
        """Go on under another grant of the training, or in a lower mode than its own, as in `loader_seen`.

        Returns:
            Why the training has to stop, as no mode keeps within the grant: the device is parked. None if it goes on.

        Raises:
            InvalidInputError: its mode was planned with the current front, and draws more than the grant allows.
            ModeNotAppliedError: its mode could not be applied.
        """
        assert grant.mode is not None, "a grant without a mode stops the training"
        # The coordinator may have planned it before it had the front of the current minibatches.
        mode = self.learner.mode_within(grant.mode, grant.power_limit_w, self._planned)
        if mode is None:
            return self._stop_since(self._no_mode(grant.power_limit_w))
        self.learner.require_within(mode, grant.power_limit_w)
        self._watch.reassign(mode, grant.power_limit_w)
        self._power_limit_w = grant.power_limit_w
        _log.info("training continues at %s within %.1f W", mode.label(), grant.power_limit_w)
        return None

    def park(self) -> None:
        """Park the device; the training has to end.

        Raises:
            ModeNotAppliedError: the device could not be parked.
        """
        self._watch.reassign(None, 0.0)

    def _keep_within_grant(self) -> str | None:
        """Fit the predictor to the minibatches, and lower the mode if that is necessary; see `loader_seen`."""
        if not self.learner.is_outdated and self.learner.prediction is self._planned:
            return None
        granted, limit_w = self._watch.mode, self._power_limit_w
        try:
            if self.learner.is_outdated:
                self.learner.refit()
                self.is_refitted = True
            mode = self.learner.mode_within(granted, limit_w, self._planned)
        except (WattfleetError, StoppedError) as error:
            # They may draw any watts, and nobody would know.
            return self._stop_since(
                f"the watts of {self._minibatches} cannot be predicted: {error or 'the agent is stopping'}"
            )
        if mode is None:
            return self._stop_since(self._no_mode(limit_w))
        if mode != granted:
            self._watch.lower(mode)
            _log.warning(
                "training continues at %s instead of %s: %s may draw more than the %.1f W granted",
                mode.label(),
                granted.label(),
                self._minibatches,
                limit_w,
            )
        return None

    def _stop_since(self, reason: str) -> str:
        self.park()
        return reason

    def _no_mode(self, limit_w: float) -> str:
        what = self._minibatches
        return f"no power mode keeps {what} within the {limit_w:.1f} W granted: the next round is planned for them"

    @property
    def _minibatches(self) -> str:
        batch = self.learner.known.workload.facts.batch
        return "the app's minibatches" if batch is None else f"the app's minibatches of {batch:,} samples"
