"""What apps import that answer requests on a device which trains as well.

In the inference server:

    from wattfleet_serving import DutyServer

    server = DutyServer(model)
    output = await server.answer(request)

In the Flower app, around the data loader:

    from wattfleet_serving import share_device

    for batch in share_device(loader):

Both ask the device's agent for turns, and both go on at once without an agent.
"""

import lazy_loader

# Names are listed in `__init__.pyi`; each module is imported when a name of it is first used (decision 0008).
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
