from .arrivals import Arrivals as Arrivals
from .arrivals import ArrivalSpan as ArrivalSpan
from .arrivals import ConstantArrivals as ConstantArrivals
from .arrivals import DailyArrivals as DailyArrivals
from .arrivals import MeasuredArrivals as MeasuredArrivals
from .duty import Duty as Duty
from .slowdown import largest_slowdown as largest_slowdown
