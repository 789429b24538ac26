from .duty_server import DutyServer as DutyServer
from .errors import RequestRefusedError as RequestRefusedError
from .errors import ServerClosedError as ServerClosedError
from .shared_loader import share_device as share_device
