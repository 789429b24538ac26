"""What a device learns from a round, once its training has ended."""

from __future__ import annotations

import logging

from edge_agent.learning.observation import Observed
from edge_agent.learning.online_learner import OnlineLearner
from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import TrainingEnded
from wattfleet.errors import WattfleetError
from wattfleet_io.tasks import shield_until_done
from wattfleet_proto.v1 import local_pb2

_log = logging.getLogger(__name__)


async def learn_from_round(
    learner: OnlineLearner,
    observed: Observed | None,
    finish: local_pb2.FinishTraining,
    supervisor: RecoverySupervisor,
    unmeasured: str | None = None,
) -> None:
    """Learn from a round, and report the state that follows.

    Args:
        learner: the learner of the trained workload.
        observed: the observation of the round; None if there is none.
        finish: the app's last message.
        supervisor: handles the end of the training.
        unmeasured: why the training has measured no mode; None if it has measured one.
    """
    drift = not_learned = None
    failed = finish.failed
    has_less_choice = finish.is_out_of_memory and learner.out_of_memory()
    try:
        if observed is not None:
            drift = await shield_until_done(learner.observe, observed)
        elif not failed or has_less_choice:
            await shield_until_done(learner.refit)
    except WattfleetError as error:
        # The round itself is complete; only its observation is lost to the predictor.
        _log.error("nothing was learned from the round: %s", error)
        not_learned = str(error)
    except StoppedError:
        not_learned = "the observation counts once the device is prepared again"
    except Exception:
        # An unexpected error ends only the learning: the device is parked and ready for the next round.
        _log.exception("nothing was learned from the round")
        not_learned = "nothing was learned from the round; see the agent's log"
    if failed or learner.profiled_modes:
        unmeasured = None
    if unmeasured is not None and unmeasured != learner.unmeasured:
        _log.warning("no mode of %s measured yet: %s", learner.known.workload.name, unmeasured)
    learner.unmeasured = unmeasured
    await supervisor.handle_with_front(TrainingEnded(failed, drift, not_learned, unmeasured))
    if has_less_choice:
        await supervisor.report_fronts()
