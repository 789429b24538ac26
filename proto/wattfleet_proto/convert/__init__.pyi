from .fronts import front_from_message as front_from_message
from .fronts import front_to_message as front_to_message
from .modes import mode_from_message as mode_from_message
from .modes import mode_to_message as mode_to_message
from .plans import plan_from_message as plan_from_message
from .plans import plan_to_message as plan_to_message
from .provenance import provenance_from_message as provenance_from_message
from .provenance import provenance_to_message as provenance_to_message
