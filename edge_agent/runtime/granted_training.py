"""Keeps a training within the watts of its grant, even if its app trains other minibatches than planned."""

from __future__ import annotations

import logging

from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.session.held_grant import Grant
from edge_agent.training.training import TrainingWatch
from wattfleet.errors import WattfleetError
from wattfleet.modes import PowerMode
from wattfleet_proto.v1 import local_pb2

_log = logging.getLogger(__name__)


class GrantedTraining:
    """One training, from its start.

    All methods but `refit` touch the device: call them in a thread, one at a time.

    Attributes:
        learner: the learner of the trained workload.
    """

    def __init__(
        self, watch: TrainingWatch, learner: OnlineLearner, grant: Grant, mode: PowerMode, epochs: float
    ) -> None:
        """Apply a mode and start to observe the training, unless the mode differs from the granted one.

        Args:
            watch: runs the training.
            learner: the learner of the trained workload.
            grant: allows the training.
            mode: a mode that keeps within the grant.
            epochs: local epochs to train.

        Raises:
            InvalidInputError: the number of epochs is out of range.
            ModeNotAppliedError: the mode could not be applied.
        """
        watch.start(learner, mode, epochs, grant.power_limit_w, grant.measuring, grant.planned_s)
        if mode != grant.mode:
            _log.warning("training begins at %s: other devices have shown that it draws less", mode.label())
            watch.lower(mode)
        self.learner = learner
        self._watch = watch
        self._power_limit_w = grant.power_limit_w
        self._is_stopped = False
        self._is_refitted = False
        self._not_fitted: Exception | None = None

    def loader_seen(self, loader: local_pb2.LoaderSeen) -> bool:
        """Use what the app reports of its data loader.

        Returns:
            Whether the app's minibatches differ from those of the predictor. If so, call `refit` and then
            `keep_within_grant`.

        Raises:
            InvalidInputError: a number is out of range.
            ModeNotAppliedError: the training's own mode could not be restored after measurements.
        """
        batch, workers, length = (
            getattr(loader, name) if loader.HasField(name) else None
            for name in ("batch", "loader_workers", "minibatches_per_epoch")
        )
        changed = self.learner.loader_seen(batch, workers, length, loader.takes_planned_batch)
        self._watch.loader_seen(changed, loader.after_minibatch)
        if changed or self.learner.is_outdated:
            return True
        self._watch.loader_handled()
        return False

    def refit(self) -> bool:
        """Fit the predictor to the app's minibatches. This may take seconds, and the training may end meanwhile.

        Returns:
            Whether the fit succeeded.
        """
        try:
            self.learner.refit_if_outdated()
        except (WattfleetError, StoppedError) as error:
            self._not_fitted = error
        return self._not_fitted is None

    def keep_within_grant(self, app_has_finished: bool) -> str | None:
        """After `refit`, lower the mode if it may exceed the grant with the app's minibatches.

        Args:
            app_has_finished: the app has ended its training meanwhile.

        Returns:
            None if the training continues. Otherwise the reason to stop it: no mode keeps within the grant, and the
            device is parked.

        Raises:
            ModeNotAppliedError: the lower mode could not be applied, or the device could not be parked.
        """
        self._is_refitted = self._not_fitted is None
        stop_reason = None
        if not self._is_stopped:
            if self._not_fitted is None:
                stop_reason = self._lower_within_grant()
            else:
                # Their power is unknown and may exceed any limit.
                why = str(self._not_fitted) or "the agent is stopping"
                stop_reason = self._stop_since(f"the watts of {self._minibatches} cannot be predicted: {why}")
        self._watch.loader_handled(app_has_finished)
        return stop_reason

    def continue_under(self, grant: Grant) -> str | None:
        """Continue under another grant, in its mode or in a lower one that keeps within it, as in `keep_within_grant`.

        A training that is already stopping ignores the grant.

        Returns:
            None if the training continues. Otherwise the reason to stop it: no mode keeps within the grant, and the
            device is parked.

        Raises:
            InvalidInputError: its mode draws more than the grant allows, and was planned with the current front.
            ModeNotAppliedError: its mode could not be applied.
        """
        assert grant.mode is not None, "the training stops: its grant has no mode"
        if self._is_stopped:
            return None
        mode: PowerMode | None = grant.mode
        if self._is_refitted:
            # The coordinator may have planned it before it had the front of the app's minibatches.
            mode = self._mode_within(grant.mode, grant.power_limit_w)
            if mode is None:
                return self._stop_since(self._no_mode(grant.power_limit_w))
        else:
            mode = self.learner.granted_mode(grant.mode, grant.power_limit_w)
        self._watch.reassign(mode, grant.power_limit_w)
        self._power_limit_w = grant.power_limit_w
        _log.info("training continues at %s within %.1f W", self._watch.mode.label(), grant.power_limit_w)
        return None

    def park(self) -> None:
        """Park the device, since the training has to end.

        Raises:
            ModeNotAppliedError: the device could not be parked.
        """
        self._is_stopped = True
        self._watch.reassign(None, 0.0)

    def _lower_within_grant(self) -> str | None:
        granted, limit_w = self._watch.mode, self._power_limit_w
        mode = self._mode_within(granted, limit_w)
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

    def _mode_within(self, mode: PowerMode, limit_w: float) -> PowerMode | None:
        try:
            return self.learner.mode_within(mode, limit_w)
        except WattfleetError as error:
            _log.error("no mode of %s is known to keep within %.1f W: %s", self._minibatches, limit_w, error)
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
