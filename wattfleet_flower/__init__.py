"""The server's side of Flower: any strategy, steered by the fleet's round plans.

from wattfleet_flower import PowerAware

strategy = PowerAware(FedAvg(), coordinator="127.0.0.1:7070")
"""

from wattfleet_flower.server.errors import NoUpdatesError, PlanningError, TwoStrategiesError
from wattfleet_flower.server.fedbuff import FedBuff
from wattfleet_flower.server.power_aware import PowerAware

__all__ = ["FedBuff", "NoUpdatesError", "PlanningError", "PowerAware", "TwoStrategiesError"]
