from .agent_stream import RequestRefusedError as RequestRefusedError
from .agent_stream import ServerClosedError as ServerClosedError
from .duty_server import DutyServer as DutyServer
from .shared_loader import share_device as share_device
