"""The server's side of Flower: any strategy, steered by the fleet's round plans.

from coordinator.flower import PowerAware

strategy = PowerAware(FedAvg(), coordinator="127.0.0.1:7070")
"""

from coordinator.flower.errors import NoUpdatesError, PlanningError, TwoStrategiesError
from coordinator.flower.fedbuff import FedBuff
from coordinator.flower.power_aware import PowerAware

__all__ = ["FedBuff", "NoUpdatesError", "PlanningError", "PowerAware", "TwoStrategiesError"]
